// A tile of a matrix product with AVX2. bf16 numbers are converted exactly to floats in registers, and multiplied as
// floats.
#pragma once

#include <utility>

#include "panel.h"

namespace motet {

constexpr int kMaxRows = 6;  // rows of a tile: 2 accumulators per row, B and A fill the 16 registers
constexpr int kEnough = 8;   // accumulators: the number of products that are in progress at once

alignas(32) constexpr std::uint32_t kTopBytes[8] = {0xff000000, 0xff000000, 0xff000000, 0xff000000,
                                                     0xff000000, 0xff000000, 0xff000000, 0xff000000};

using PairBits = std::uint32_t __attribute__((may_alias));

// Loads a pair of a row into all lanes. It is loaded again for its second number, because there are no registers to
// keep both, as a compiler would.
inline __m256i broadcast_pair(const bf16* pair) {
  __m256i lanes;
  asm volatile("vpbroadcastd %1, %0" : "=x"(lanes) : "m"(*(const PairBits*)pair));
  return lanes;
}

// Returns number `Which` (0 or 1) of each pair as a float.
template <int Which>
inline __m256 number_of(__m256i pairs) {
  return _mm256_castsi256_ps(Which ? _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))
                                   : _mm256_slli_epi32(pairs, 16));
}

// Returns number `Which` of a row's slice in every lane.
template <int Which>
inline __m256 broadcast_number(const float* slice) {
  return _mm256_broadcast_ss(slice);
}
template <int Which>
inline __m256 broadcast_number(const bf16* slice) {
  return number_of<Which>(broadcast_pair(slice));
}

// Loads number `Which` of a slice for 8 columns: the first (`eight` = 0) or second 8 columns of half `Half` of a panel.
template <int Which, int Half>
inline __m256 load_number(const float* slice, int eight) {
  return _mm256_loadu_ps(slice + Half * kLanes + eight * 8);
}

template <int Which, int Half>
inline __m256 load_number(const bf16* slice, int eight) {
  return number_of<Which>(_mm256_loadu_si256((const __m256i*)(slice + Half * kPanel + eight * kLanes)));
}

template <int Which, int Half>
inline __m256 load_number(const std::int8_t* slice, int eight) {
  const __m256i four = _mm256_loadu_si256((const __m256i*)(slice + eight * kPanel));  // numbers in each lane
  __m256i top = _mm256_slli_epi32(four, 24 - 8 * (2 * Half + Which));
  asm("vpand %1, %0, %0" : "+x"(top) : "m"(kTopBytes));  // in memory, because a register would displace a sum
  return _mm256_cvtepi32_ps(top);
}

// Multiplies halves [First, First + Halves) of the panels with all rows, and adds the products to `sums[row][half]`.
template <int Rows, int First, int Halves, class Number, class Weight, class Fetch, class Sums>
inline void halves(const Number* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int slices,
                   Fetch fetch, Sums& sums) {
  __m256 sum[Rows][Halves][2];
#pragma GCC unroll 6
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int half = 0; half < Halves; ++half) {
      sum[row][half][0] = sums[row][First + half].low;
      sum[row][half][1] = sums[row][First + half].high;
    }
  for (int slice = 0; slice < slices; ++slice) {
    const auto multiply = [&]<int Which>() {
      __m256 right[Halves][2];
      const auto load = [&]<int Half>() {
        const Weight* from = b + Half / 2 * b_stride + slice * kSlice<Weight>;
        right[Half - First][0] = load_number<Which, Half % 2>(from, 0);
        right[Half - First][1] = load_number<Which, Half % 2>(from, 1);
      };
      [&]<int... Half>(std::integer_sequence<int, Half...>) {
        (load.template operator()<First + Half>(), ...);
      }(std::make_integer_sequence<int, Halves>());
#pragma GCC unroll 6
      for (int row = 0; row < Rows; ++row) {
        const __m256 left = broadcast_number<Which>(a + row * a_stride + slice * kDeep<Number>);
#pragma GCC unroll 4
        for (int half = 0; half < Halves; ++half) {
          sum[row][half][0] = _mm256_fmadd_ps(left, right[half][0], sum[row][half][0]);
          sum[row][half][1] = _mm256_fmadd_ps(left, right[half][1], sum[row][half][1]);
        }
      }
    };
    if constexpr (First == 0) fetch(b + slice * kSlice<Weight>);
    multiply.template operator()<0>();
    if constexpr (kDeep<Number> == 2) multiply.template operator()<1>();
  }
#pragma GCC unroll 6
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int half = 0; half < Halves; ++half) sums[row][First + half] = {sum[row][half][0], sum[row][half][1]};
}

// Multiplies `Rows` rows with `Panels` adjacent panels over slices [0, slices). Sums start with
// `start(row, panel, half)`. The results are passed to `done(row, panel, left, right)`, 16 columns each. `fetch` is
// called with each slice of the first panel, to prefetch other data during this time.
template <int Rows, int Panels, class Number, class Weight, class Fetch, class Start, class Done>
inline void tile(const Number* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int slices, Fetch fetch,
                 Start start, Done done) {
  constexpr int kAll = 2 * Panels, kFit = kEnough / (2 * Rows), kHalves = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  constexpr int kTaken = kHalves < kAll ? kHalves : kAll;
  Floats sums[Rows][kAll];
  for (int row = 0; row < Rows; ++row)
    for (int half = 0; half < kAll; ++half) sums[row][half] = start(row, half / 2, half % 2);
  [&]<int... Step>(std::integer_sequence<int, Step...>) {
    (halves<Rows, Step * kTaken, kTaken>(a, a_stride, b, b_stride, slices, fetch, sums), ...);
  }(std::make_integer_sequence<int, kAll / kTaken>());
  for (int row = 0; row < Rows; ++row)
    for (int panel = 0; panel < Panels; ++panel) done(row, panel, sums[row][2 * panel], sums[row][2 * panel + 1]);
}

}  // namespace motet
