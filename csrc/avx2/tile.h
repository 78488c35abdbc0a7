// A tile of a matrix product with AVX2: bf16 numbers become floats in registers, exactly, and are multiplied as such.
#pragma once

#include <cstring>

#include "panel.h"

namespace motet {

constexpr int kMaxRows = 6;          // of a tile: with 2 accumulators each, B and A they fill the 16 registers
constexpr int kMaxAccumulators = 12;

// Number `Which` (0 or 1) of pairs, as floats.
template <int Which>
inline __m256 number_of(__m256i pairs) {
  return _mm256_castsi256_ps(Which ? _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))
                                   : _mm256_slli_epi32(pairs, 16));
}

// Number `Which` of a pair of 8 columns: the first or the second 8 (`eight`) of a half of a panel.
template <int Which>
inline __m256 load_number(const bf16* pair, int half, int eight) {
  return number_of<Which>(_mm256_loadu_si256((const __m256i*)(pair + half * kPanel + eight * kLanes)));
}

template <int Which>
inline __m256 load_number(const std::int8_t* pair, int half, int eight) {
  const __m256i four = _mm256_loadu_si256((const __m256i*)(pair + eight * kPanel));
  const __m256i top = _mm256_slli_epi32(four, half ? Which ? 0 : 8 : Which ? 16 : 24);
  return _mm256_cvtepi32_ps(_mm256_and_si256(top, _mm256_set1_epi32(0xff000000)));
}

// Halves [0, Halves) of the panels, counted from `first` on, with all rows; `result(row, half)` is where sums lie.
template <int Rows, int Halves, class Weight, class Result>
inline void halves(const bf16* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int pairs, int first,
                   bool fetch, Result result) {
  __m256 sum[Rows][Halves][2];
#pragma GCC unroll 6
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int half = 0; half < Halves; ++half) {
      sum[row][half][0] = result(row, first + half).low;
      sum[row][half][1] = result(row, first + half).high;
    }
  for (int pair = 0; pair < pairs; ++pair) {
    const auto multiply = [&]<int Which>() {
      __m256 right[Halves][2];
#pragma GCC unroll 4
      for (int half = 0; half < Halves; ++half) {
        const Weight* from = b + (first + half) / 2 * b_stride + pair * kPair;
        right[half][0] = load_number<Which>(from, (first + half) % 2, 0);
        right[half][1] = load_number<Which>(from, (first + half) % 2, 1);
      }
#pragma GCC unroll 6
      for (int row = 0; row < Rows; ++row) {
        int bits;
        std::memcpy(&bits, a + row * a_stride + 2 * pair, sizeof bits);
        const __m256 left = number_of<Which>(_mm256_set1_epi32(bits));
#pragma GCC unroll 4
        for (int half = 0; half < Halves; ++half) {
          sum[row][half][0] = _mm256_fmadd_ps(left, right[half][0], sum[row][half][0]);
          sum[row][half][1] = _mm256_fmadd_ps(left, right[half][1], sum[row][half][1]);
        }
      }
    };
    if (fetch) fetch_pair(b + first / 2 * b_stride + pair * kPair, b_stride);
    multiply.template operator()<0>();
    multiply.template operator()<1>();
  }
#pragma GCC unroll 6
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int half = 0; half < Halves; ++half) result(row, first + half) = {sum[row][half][0], sum[row][half][1]};
}

// `Rows` rows times `Panels` neighbouring panels, from pair 0 to `pairs`; `done(row, panel, left 16, right 16)` takes
// each result. `start(row, panel, half)` says what the sums begin with.
template <int Rows, int Panels, class Weight, class Start, class Done>
inline void tile(const bf16* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int pairs, Start start,
                 Done done) {
  constexpr int kAll = 2 * Panels, kFit = kMaxAccumulators / (2 * Rows), kHalves = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  constexpr int kTaken = kHalves < kAll ? kHalves : kAll;
  Floats sums[Rows][kAll];
  for (int row = 0; row < Rows; ++row)
    for (int half = 0; half < kAll; ++half) sums[row][half] = start(row, half / 2, half % 2);
  for (int first = 0; first < kAll; first += kTaken)
    halves<Rows, kTaken>(a, a_stride, b, b_stride, pairs, first, first == 0,
                         [&](int row, int half) -> Floats& { return sums[row][half]; });
  for (int row = 0; row < Rows; ++row)
    for (int panel = 0; panel < Panels; ++panel) done(row, panel, sums[row][2 * panel], sums[row][2 * panel + 1]);
}

}  // namespace motet
