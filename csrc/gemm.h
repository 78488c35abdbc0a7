// Matrix products over packed weights: C[rows, columns] = A[rows, depth] * B, with A and B in bf16 and sums in float32.
//
// B is stored in panels of 32 columns. Inside a panel, pairs of depth follow each other:
//
//     panel[pair][column / 16][column % 16][2]        128 bytes a pair
//
// which is what `vdpbf16ps` eats: one instruction multiplies a pair of one row with 16 columns. Every element of C is
// summed by one accumulator, pair after pair from 0 on, whatever stands beside it. So a row's bits do not depend on
// how many rows there are, on the number of threads, or on how the work is cut.
//
// B may be int8 numbers, with a scale for every column: the two of a column, then the two of the column 16 further on.
//
//     panel[pair][column % 16][column / 16][2]        64 bytes a pair
//
// They become bf16 on the way to the unit, 2^24 times as large as they are, which is exact. So one kernel serves both.
#pragma once

#include <cstring>

#include "vectors.h"

namespace motet {

constexpr int kPanel = 32;
constexpr int kPair = 2 * kPanel;       // numbers of a pair of a panel
constexpr float kInt8Unit = 0x1p-24f;   // what sums over int8 numbers are to be multiplied with
constexpr int kMaxRows = 12;            // rows of a tile: with 2 accumulators each, and B, they fill the 32 registers
constexpr int kDepthBlock = 1024;       // taken at once: 12 rows of A stay in the first cache, a panel in the second

inline int panels_of(int columns) { return (columns + kPanel - 1) / kPanel; }
inline std::size_t panel_size(int depth) { return std::size_t(depth) * kPanel; }  // in numbers

// Where in a pair of a panel a column's two numbers lie.
template <class Weight>
constexpr int place_of(int column) {
  return sizeof(Weight) == sizeof(bf16) ? 2 * column : column % kLanes * 4 + column / kLanes * 2;
}

// 32 columns of a pair.
inline void load_pair(const bf16* from, __m512bh pair[2]) {
  pair[0] = (__m512bh)_mm512_loadu_si512(from);
  pair[1] = (__m512bh)_mm512_loadu_si512(from + kPanel);
}

inline void load_pair(const std::int8_t* from, __m512bh pair[2]) {
  const __m512i four = _mm512_loadu_si512(from), top = _mm512_set1_epi32(0xff000000);
  const auto number = [&](__m512i x) {  // of the top byte, as a float whose lower half is zero
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(x, top)));
  };
  const auto beside = [](__m512i even, __m512i odd) {
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
  };
  pair[0] = beside(number(_mm512_slli_epi32(four, 24)), number(_mm512_slli_epi32(four, 16)));
  pair[1] = beside(number(_mm512_slli_epi32(four, 8)), number(four));
}

// What lies `ahead` numbers on is on its way from memory while the pair at `from` is multiplied.
template <class Weight>
inline void fetch_pair(const Weight* from, std::size_t ahead) {
  for (std::size_t byte = 0; byte < kPair * sizeof(Weight); byte += 64)
    _mm_prefetch((const char*)(from + ahead) + byte, _MM_HINT_T1);
}

// `Rows` rows times `Panels` neighbouring panels, from pair 0 to `pairs`; `done(row, panel, left 16, right 16)` takes
// each result. `start(row, panel, half)` says what the sums begin with.
template <int Rows, int Panels, class Weight, class Start, class Done>
inline void tile(const bf16* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int pairs, Start start,
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
      const Weight* from = b + panel * b_stride + pair * kPair;
      load_pair(from, right[panel]);
      if constexpr (Panels <= 2) fetch_pair(from, Panels * b_stride);  // of more, the processor fetches what comes next
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
template <int Panels, int Rows = kMaxRows / Panels, class Weight, class Start, class Done>
inline void tile_of(int rows, const bf16* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int pairs,
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
template <class Weight, class Done>
void product(int rows, const bf16* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int panels, int depth,
             float* sums, Done done) {
  const std::size_t width = std::size_t(panels) * kPanel;
  for (int begin = 0; begin < depth; begin += kDepthBlock) {
    const int end = begin + kDepthBlock < depth ? begin + kDepthBlock : depth;
    const bool first = begin == 0, last = end == depth;
    const Weight* block = b + std::size_t(begin) * kPanel;
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
    if constexpr (sizeof(Weight) == sizeof(bf16)) {  // to wait for sums is to unpack what comes next
      if (rows <= 3)
        for (; panel + 4 <= panels; panel += 4) strip.template operator()<4>(panel);
      if (rows <= 6)
        for (; panel + 2 <= panels; panel += 2) strip.template operator()<2>(panel);
    }
    for (; panel < panels; ++panel) strip.template operator()<1>(panel);
  }
}

}  // namespace motet
