// Matrix products over packed weights: C[rows, columns] = A[rows, depth] * B, with A and B in bf16 and sums in float32.
//
// B is stored in panels of 32 columns. Inside a panel, pairs of depth follow each other:
//
//     panel[pair][column / 16][column % 16][2]        128 bytes a pair
//
// which is what `vdpbf16ps` eats: one instruction multiplies a pair of one row with 16 columns. Every element of C is
// summed by one accumulator, pair after pair from 0 on, whatever stands beside it. So a row's bits do not depend on
// how many rows there are, on the number of threads, or on how the work is cut.
#pragma once

#include <cstring>

#include "vectors.h"

namespace motet {

constexpr int kPanel = 32;
constexpr int kPairBytes = 2 * kPanel * sizeof(bf16);
constexpr int kMaxRows = 12;        // rows of a tile: with 2 accumulators each, and B, they fill the 32 registers
constexpr int kDepthBlock = 1024;   // depth taken at once: 12 rows of A stay in the first cache, a panel in the second

inline int panels_of(int columns) { return (columns + kPanel - 1) / kPanel; }
inline std::size_t panel_size(int depth) { return std::size_t(depth) * kPanel; }  // in bf16

// `Rows` rows times `Panels` neighbouring panels, from pair 0 to `pairs`; `done(row, panel, left 16, right 16)` takes
// each result. `start(row, panel, half)` says what the sums begin with.
template <int Rows, int Panels, class Start, class Done>
inline void tile(const bf16* a, std::size_t a_stride, const bf16* b, std::size_t b_stride, int pairs, Start start,
                 Done done) {
  __m512 sum[Rows][Panels][2];
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
      const bf16* from = b + panel * b_stride + pair * (kPairBytes / sizeof(bf16));
      right[panel][0] = (__m512bh)_mm512_loadu_si512(from);
      right[panel][1] = (__m512bh)_mm512_loadu_si512(from + kPanel);
      if constexpr (Panels == 1) {  // the next panel is on its way from memory while this one is multiplied
        _mm_prefetch((const char*)(from + b_stride), _MM_HINT_T1);
        _mm_prefetch((const char*)(from + b_stride + kPanel), _MM_HINT_T1);
      }
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

// `rows` (1 to 12) rows times `Panels` panels. Few rows want several panels at once, or they wait for their own sums.
template <int Panels, int Rows = kMaxRows / Panels, class Start, class Done>
inline void tile_of(int rows, const bf16* a, std::size_t a_stride, const bf16* b, std::size_t b_stride, int pairs,
                    Start start, Done done) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return tile_of<Panels, Rows - 1>(rows, a, a_stride, b, b_stride, pairs, start, done);
  }
  tile<Rows, Panels>(a, a_stride, b, b_stride, pairs, start, done);
}

// Rows that tiles of at most `most` rows share evenly.
inline int even_tile(int rows, int most) {
  const int tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

// All `rows` rows times panels [0, panels), which lie `b_stride` apart; `done(row, panel, left, right)` takes the results.
// A depth over kDepthBlock is summed block by block in `sums`, scratch [rows][panels * 32] float32.
template <class Done>
void product(int rows, const bf16* a, std::size_t a_stride, const bf16* b, std::size_t b_stride, int panels, int depth,
             float* sums, Done done) {
  const std::size_t width = std::size_t(panels) * kPanel;
  for (int begin = 0; begin < depth; begin += kDepthBlock) {
    const int end = begin + kDepthBlock < depth ? begin + kDepthBlock : depth;
    const bool first = begin == 0, last = end == depth;
    const bf16* block = b + std::size_t(begin) * kPanel;
    auto strip = [&]<int Panels>(int panel) {
      const int height = even_tile(rows, kMaxRows / Panels);
      for (int row = 0; row < rows; row += height) {
        const int count = rows - row < height ? rows - row : height;
        float* here = sums + row * width + panel * kPanel;
        tile_of<Panels>(
            count, a + row * a_stride + begin, a_stride, block + panel * b_stride, b_stride, (end - begin) / 2,
            [&](int r, int p, int half) {
              return first ? _mm512_setzero_ps() : _mm512_loadu_ps(here + r * width + p * kPanel + half * kLanes);
            },
            [&](int r, int p, __m512 left, __m512 right) {
              if (last) return done(row + r, panel + p, left, right);
              _mm512_storeu_ps(here + r * width + p * kPanel, left);
              _mm512_storeu_ps(here + r * width + p * kPanel + kLanes, right);
            });
      }
    };
    int panel = 0;
    if (rows <= 3)
      for (; panel + 4 <= panels; panel += 4) strip.template operator()<4>(panel);
    if (rows <= 6)
      for (; panel + 2 <= panels; panel += 2) strip.template operator()<2>(panel);
    for (; panel < panels; ++panel) strip.template operator()<1>(panel);
  }
}

}  // namespace motet
