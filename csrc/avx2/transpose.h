// Transposes rows into columns of a panel, with AVX2.
#pragma once

#include "panel.h"

namespace motet {

// Transposes 8 rows of 8 words of 32 bits, pairs of bf16 or floats. Each vector then has one word of each row.
inline void transpose(__m256i v[8]) {
  __m256i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) v[i] = t[i];
}

// Writes 16 columns of 16 slices of a panel, from 16 rows of 16 words.
template <class Number>
inline void pack_block(Number* to, const Number* const rows[kLanes]) {
  for (int row = 0; row < kLanes; row += 8)
    for (int slice = 0; slice < kLanes; slice += 8) {
      __m256i v[8];
      for (int i = 0; i < 8; ++i) v[i] = _mm256_loadu_si256((const __m256i*)(rows[row + i] + kDeep<Number> * slice));
      transpose(v);
      Number* here = to + slice * kSlice<Number> + row * kDeep<Number>;
      for (int i = 0; i < 8; ++i) _mm256_storeu_si256((__m256i*)(here + i * kSlice<Number>), v[i]);
    }
}

// Writes one slice of a panel from 32 consecutive numbers of each row.
inline void pack_slice(bf16* to, const bf16* const rows[2]) {
  for (int column = 0; column < kPanel; column += kLanes) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)(rows[0] + column));
    const __m256i b = _mm256_loadu_si256((const __m256i*)(rows[1] + column));
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);  // within each half
    _mm256_storeu_si256((__m256i*)(to + 2 * column), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((__m256i*)(to + 2 * column + kLanes), _mm256_permute2x128_si256(low, high, 0x31));
  }
}

}  // namespace motet
