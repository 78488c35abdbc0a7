// A tile of a matrix product with AVX-512: `vdpbf16ps` multiplies a pair of one row with 16 columns at once.
#pragma once

#include <cstring>

#include "panel.h"

namespace motet {

constexpr int kMaxRows = 12;  // rows of a tile: 2 accumulators for each, and B, fill the 32 registers

// Loads 32 columns of a pair.
inline void load_pair(const bf16* from, __m512bh pair[2]) {
  pair[0] = (__m512bh)_mm512_loadu_si512(from);
  pair[1] = (__m512bh)_mm512_loadu_si512(from + kPanel);
}

inline void load_pair(const std::int8_t* from, __m512bh pair[2]) {
  const __m512i four = _mm512_loadu_si512(from), top = _mm512_set1_epi32(0xff000000);
  const auto number = [&](__m512i x) {  // the top byte as a float, whose lower half is zero
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(x, top)));
  };
  const auto beside = [](__m512i even, __m512i odd) {
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
  };
  pair[0] = beside(number(_mm512_slli_epi32(four, 24)), number(_mm512_slli_epi32(four, 16)));
  pair[1] = beside(number(_mm512_slli_epi32(four, 8)), number(four));
}

// Multiplies `Rows` rows with `Panels` neighbouring panels, from pair 0 to `pairs`. Sums begin with
// `start(row, panel, half)`; `done(row, panel, left 16, right 16)` takes each result.
template <int Rows, int Panels, class Weight, class Start, class Done>
inline void tile(const bf16* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int pairs, Start start,
                 Done done) {
  Floats sum[Rows][Panels][2];
#pragma GCC unroll 12
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) {
      sum[row][panel][0] = start(row, panel, 0);
      sum[row][panel][1] = start(row, panel, 1);
    }
  for (int pair = 0; pair < pairs; ++pair) {
    __m512bh right[Panels][2];
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) {
      const Weight* from = b + panel * b_stride + pair * kPair;
      load_pair(from, right[panel]);
      if constexpr (Panels <= 2) fetch_pair(from, Panels * b_stride);  // for more, the processor prefetches by itself
    }
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
      int bits;
      std::memcpy(&bits, a + row * a_stride + 2 * pair, sizeof bits);
      const __m512bh left = (__m512bh)_mm512_set1_epi32(bits);
#pragma GCC unroll 4
      for (int panel = 0; panel < Panels; ++panel) {
        sum[row][panel][0] = _mm512_dpbf16_ps(sum[row][panel][0], left, right[panel][0]);
        sum[row][panel][1] = _mm512_dpbf16_ps(sum[row][panel][1], left, right[panel][1]);
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) done(row, panel, sum[row][panel][0], sum[row][panel][1]);
}

}  // namespace motet
