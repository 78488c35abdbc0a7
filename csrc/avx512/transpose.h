// Transposes rows into columns of a panel, with AVX-512.
#pragma once

#include "panel.h"

namespace motet {

// Transposes 16 rows of 16 words of 32 bits, pairs of bf16 or floats. Each vector then has one word of each row.
inline void transpose(__m512i v[kLanes]) {
  __m512i t[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Writes 16 columns of 16 slices of a panel, from 16 rows of 16 words.
template <class Number>
inline void pack_block(Number* to, const Number* const rows[kLanes]) {
  __m512i v[kLanes];
  for (int i = 0; i < kLanes; ++i) v[i] = _mm512_loadu_si512(rows[i]);
  transpose(v);
  for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(to + i * kSlice<Number>, v[i]);
}

// Writes one slice of a panel from 32 consecutive numbers of each row.
inline void pack_slice(bf16* to, const bf16* const rows[2]) {
  alignas(64) static constexpr auto order = [] {
    struct { std::uint16_t left[32], right[32]; } o{};
    for (int i = 0; i < kLanes; ++i) {
      o.left[2 * i] = i;
      o.left[2 * i + 1] = 32 + i;
      o.right[2 * i] = kLanes + i;
      o.right[2 * i + 1] = 32 + kLanes + i;
    }
    return o;
  }();
  const __m512i a = _mm512_loadu_si512(rows[0]), b = _mm512_loadu_si512(rows[1]);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, _mm512_load_si512(order.left), b));
  _mm512_storeu_si512(to + kPanel, _mm512_permutex2var_epi16(a, _mm512_load_si512(order.right), b));
}

}  // namespace motet
