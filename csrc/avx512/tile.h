// A tile of a matrix product with AVX-512: `vdpbf16ps` multiplies a pair of one row with 16 columns at once, FMA a
// single float32.
#pragma once

#include <cstring>

#include "panel.h"

namespace motet {

constexpr int kMaxRows = 12;  // rows of a tile: 2 accumulators per row and B fill the 32 registers

// Loads 32 columns of a slice.
inline void load_slice(const float* from, Floats slice[2]) {
  slice[0] = load(from);
  slice[1] = load(from + kLanes);
}

inline void load_slice(const bf16* from, __m512bh slice[2]) {
  slice[0] = (__m512bh)_mm512_loadu_si512(from);
  slice[1] = (__m512bh)_mm512_loadu_si512(from + 2 * kLanes);
}

inline void load_slice(const std::int8_t* from, __m512bh slice[2]) {
  const __m512i four = _mm512_loadu_si512(from), top = _mm512_set1_epi32(0xff000000);
  const auto number = [&](__m512i x) {  // the top byte as a float, whose lower half is zero
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(x, top)));
  };
  const auto interleave = [](__m512i even, __m512i odd) {
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
  };
  slice[0] = interleave(number(_mm512_slli_epi32(four, 24)), number(_mm512_slli_epi32(four, 16)));
  slice[1] = interleave(number(_mm512_slli_epi32(four, 8)), number(four));
}

// Returns the numbers of a row's slice in every lane.
inline Floats broadcast(const float* slice) { return all(*slice); }
inline __m512bh broadcast(const bf16* slice) {
  int bits;
  std::memcpy(&bits, slice, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}

inline Floats add_products(Floats sum, Floats left, Floats right) { return fma(left, right, sum); }
inline Floats add_products(Floats sum, __m512bh left, __m512bh right) { return _mm512_dpbf16_ps(sum, left, right); }

// Multiplies `Rows` rows with `Panels` adjacent panels over slices [0, slices). Sums start with
// `start(row, panel, half)`. The results are passed to `done(row, panel, left, right)`, 16 columns each. `fetch` is
// called with each slice of the first panel, to prefetch other data during this time.
template <int Rows, int Panels, class Number, class Weight, class Fetch, class Start, class Done>
__attribute__((always_inline)) inline void tile(const Number* a, std::size_t a_stride, const Weight* b,
                                                std::size_t b_stride, int slices, Fetch fetch, Start start, Done done) {
  using Lanes = decltype(broadcast(a));
  Floats sum[Rows][Panels][2];
#pragma GCC unroll 12
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) {
      sum[row][panel][0] = start(row, panel, 0);
      sum[row][panel][1] = start(row, panel, 1);
    }
  const Weight* from = b;
  for (std::size_t slice = 0; slice < std::size_t(slices); ++slice, from += kSlice<Weight>) {
    Lanes right[Panels][2];
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) load_slice(from + panel * b_stride, right[panel]);
    fetch(from);
    const std::size_t even = slice * kDeep<Number>;
    std::size_t odd = even + a_stride;
    asm("" : "+r"(odd));  // makes the compiler use one pointer for two rows, because there are no registers for twelve
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
      const Lanes left = broadcast(a + row / 2 * 2 * a_stride + (row % 2 ? odd : even));
#pragma GCC unroll 4
      for (int panel = 0; panel < Panels; ++panel) {
        sum[row][panel][0] = add_products(sum[row][panel][0], left, right[panel][0]);
        sum[row][panel][1] = add_products(sum[row][panel][1], left, right[panel][1]);
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) done(row, panel, sum[row][panel][0], sum[row][panel][1]);
}

}  // namespace motet
