// Matrix products over packed weights: C[rows, columns] = A[rows, depth] * B, with A and B in bf16 or float32 (B also
// in int8, beside bf16), and sums in float32.
//
// One accumulator sums each element of C, slice after slice from 0 on, whatever stands beside it. So a row's bits do
// not depend on the number of rows or threads, or on how the work is cut.
#pragma once

#include "tile.h"  // from avx512 or avx2

namespace motet {

// Depth taken at once: rows of A stay in the L1 cache, a panel in L2.
template <class Number>
constexpr int kDepthBlock = 2048 / sizeof(Number);

// Multiplies `rows` rows (1 to kMaxRows / Panels) with `Panels` panels. Few rows need several panels at once; with one
// they would wait for their own sums.
template <int Panels, int Rows = kMaxRows / Panels, class Number, class Weight, class Start, class Done>
inline void tile_of(int rows, const Number* a, std::size_t a_stride, const Weight* b, std::size_t b_stride,
                    int slices, Start start, Done done) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return tile_of<Panels, Rows - 1>(rows, a, a_stride, b, b_stride, slices, start, done);
  }
  tile<Rows, Panels>(a, a_stride, b, b_stride, slices, start, done);
}

// Returns the height of the fewest tiles, at most `most` rows high, that share the rows evenly.
inline int even_tile(int rows, int most) {
  const int tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

// Multiplies all `rows` rows with panels [0, panels), which lie `b_stride` apart; `done(row, panel, left, right)` takes
// the results. A depth over kDepthBlock is summed block by block in `sums`, scratch [rows][panels * 32] float32.
template <class Number, class Weight, class Done>
void product(int rows, const Number* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int panels,
             int depth, float* sums, Done done) {
  constexpr int kBlock = kDepthBlock<Number>;
  const std::size_t width = std::size_t(panels) * kPanel;
  for (int begin = 0; begin < depth; begin += kBlock) {
    const int end = begin + kBlock < depth ? begin + kBlock : depth;
    const bool first = begin == 0, last = end == depth;
    const Weight* block = b + std::size_t(begin) * kPanel;
    auto strip = [&]<int Panels>(int panel) {
      const int height = even_tile(rows, kMaxRows / Panels);
      for (int row = 0; row < rows; row += height) {
        const int count = rows - row < height ? rows - row : height;
        float* here = sums + row * width + panel * kPanel;
        tile_of<Panels>(
            count, a + row * a_stride + begin, a_stride, block + panel * b_stride, b_stride,
            (end - begin) / kDeep<Number>,
            [&](int r, int p, int half) {
              return first ? all(0.0f) : load(here + r * width + p * kPanel + half * kLanes);
            },
            [&](int r, int p, Floats left, Floats right) {
              if (last) return done(row + r, panel + p, left, right);
              store(here + r * width + p * kPanel, left);
              store(here + r * width + p * kPanel + kLanes, right);
            });
      }
    };
    int panel = 0;
    if constexpr (sizeof(Weight) > 1) {  // int8 needs one: it unpacks weights while it waits for sums
      if (rows <= kMaxRows / 4)
        for (; panel + 4 <= panels; panel += 4) strip.template operator()<4>(panel);
      if (rows <= kMaxRows / 2)
        for (; panel + 2 <= panels; panel += 2) strip.template operator()<2>(panel);
    }
    for (; panel < panels; ++panel) strip.template operator()<1>(panel);
  }
}

}  // namespace motet
