// Matrix products with packed weights: C[rows, columns] = A[rows, depth] * B, with A and B in bf16 or float32 (B also
// in int8 if A is bf16), and sums in float32.
//
// Each element of C is summed by one accumulator, over ascending slices, independent of all other elements. A row's
// bits therefore do not depend on the number of rows or threads, or on how the work is cut.
#pragma once

#include "tile.h"  // from avx512 or avx2

namespace motet {

// Depth per pass if the rows fill several tiles, so that rows of A stay in the L1 cache and a panel in L2.
template <class Number>
constexpr int kDepthBlock = 2048 / sizeof(Number);

// Products with up to kFewRowsOfTile rows are limited by memory bandwidth. They are fastest if weights are prefetched
// into the L1 cache. Products with more rows are fastest if weights are prefetched into L2, and earlier.
constexpr int kFewRowsOfTile = 5;
constexpr std::size_t kAheadOfFew = 6 << 10, kAheadOfMore = 12 << 10;  // bytes

// Multiplies `rows` rows (1 to Rows) with `Panels` panels.
template <int Panels, int Rows, class Number, class Weight, class Fetch, class Start, class Done>
__attribute__((always_inline)) inline void tile_of(int rows, const Number* a, std::size_t a_stride, const Weight* b,
                                                   std::size_t b_stride, int slices, Fetch fetch, Start start,
                                                   Done done) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return tile_of<Panels, Rows - 1>(rows, a, a_stride, b, b_stride, slices, fetch, start, done);
  }
  tile<Rows, Panels>(a, a_stride, b, b_stride, slices, fetch, start, done);
}

// Returns the height of tiles that divide the rows evenly into as few tiles of at most `max_height` rows as possible.
inline int even_tile(int rows, int max_height) {
  const int tiles = (rows + max_height - 1) / max_height;
  return (rows + tiles - 1) / tiles;
}

// Multiplies all rows with one panel after the other, in tiles of at most `Height` rows. A depth greater than `block`
// is summed in blocks.
template <int Height, class Number, class Weight, class Fetch, class Done>
void product_by_panels(int rows, const Number* a, std::size_t a_stride, const Weight* b, std::size_t b_stride,
                       int panels, int depth, int block, float* sums, Fetch fetch, Done done) {
  const std::size_t width = std::size_t(panels) * kPanel;
  const int height = even_tile(rows, Height);
  for (int begin = 0; begin < depth; begin += block) {
    const int end = begin + block < depth ? begin + block : depth;
    const bool first = begin == 0, last = end == depth;
    for (int panel = 0; panel < panels; ++panel)
      for (int row = 0; row < rows; row += height) {
        const int count = rows - row < height ? rows - row : height;
        float* here = sums + row * width + panel * kPanel;
        tile_of<1, Height>(
            count, a + row * a_stride + begin, a_stride, b + std::size_t(begin) * kPanel + panel * b_stride, b_stride,
            (end - begin) / kDeep<Number>, fetch,
            [&](int r, int, int half) { return first ? all(0.0f) : load(here + r * width + half * kLanes); },
            [&](int r, int, Floats left, Floats right) {
              if (last) return done(row + r, panel, left, right);
              store(here + r * width, left);
              store(here + r * width + kLanes, right);
            });
      }
  }
}

// Multiplies all `rows` rows with panels [0, panels) of weights, which are `b_stride` numbers apart, and passes the
// results to `done(row, panel, left, right)`. `sums` is scratch [rows][panels * 32] float32.
//
// Weights come from memory, which is fastest as one stream that is prefetched at a constant distance. Rows that fit
// into one tile read each weight once, so they use the full depth at once. With more rows, there is time to prefetch
// the complete next panel.
template <class Number, class Weight, class Done>
void product(int rows, const Number* a, std::size_t a_stride, const Weight* b, std::size_t b_stride, int panels,
             int depth, float* sums, Done done) {
  if (rows <= kFewRowsOfTile)
    return product_by_panels<kFewRowsOfTile>(rows, a, a_stride, b, b_stride, panels, depth, depth, sums,
                                             Ahead<_MM_HINT_T0>{kAheadOfFew}, done);
  const bool single = rows <= kMaxRows;
  product_by_panels<kMaxRows>(rows, a, a_stride, b, b_stride, panels, depth, single ? depth : kDepthBlock<Number>, sums,
                              Ahead<_MM_HINT_T1>{single ? kAheadOfMore : b_stride * sizeof(Weight)}, done);
}

// Multiplies rows with panels that are in a cache and have a small depth. Few rows use several panels at once, because
// with one panel they would wait for the latency of their own sums. `fetch()` is called once for each slice of a tile.
template <class Number, class Fetch, class Done>
void product_in_cache(int rows, const Number* a, std::size_t a_stride, const Number* b, std::size_t b_stride,
                      int panels, int depth, Fetch fetch, Done done) {
  auto strip = [&]<int Panels>(int panel) {
    constexpr int kHeight = kMaxRows / Panels;
    const int height = even_tile(rows, kHeight);
    for (int row = 0; row < rows; row += height)
      tile_of<Panels, kHeight>(
          rows - row < height ? rows - row : height, a + row * a_stride, a_stride, b + panel * b_stride, b_stride,
          depth / kDeep<Number>, [&](const Number*) { fetch(); }, [](int, int, int) { return all(0.0f); },
          [&](int r, int p, Floats left, Floats right) { done(row + r, panel + p, left, right); });
  };
  int panel = 0;
  if (rows <= kMaxRows / 4)
    for (; panel + 4 <= panels; panel += 4) strip.template operator()<4>(panel);
  if (rows <= kMaxRows / 2)
    for (; panel + 2 <= panels; panel += 2) strip.template operator()<2>(panel);
  for (; panel < panels; ++panel) strip.template operator()<1>(panel);
}

}  // namespace motet
