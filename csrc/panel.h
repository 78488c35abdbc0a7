// The layout of a matrix product's weights in memory: panels of 32 columns. A panel is a sequence of slices along the
// depth. A slice has a pair of bf16 numbers of each column, or one float32 of each column:
//
//     panel[slice][column / 16][column % 16][2]       128 bytes per slice, bf16
//     panel[slice][column / 16][column % 16]          128 bytes per slice, float32
//
// If A is bf16, B can be int8 numbers with a scale for every column. A slice then has the pair of a column, followed by
// the pair of the column 16 later:
//
//     panel[slice][column % 16][column / 16][2]       64 bytes per slice, int8
//
// In registers, int8 numbers are converted to floats (or bf16) that are 2^24 times as large, which is exact. One kernel
// therefore multiplies both types.
#pragma once

#include "vectors.h"

namespace motet {

constexpr int kPanel = 32;
constexpr float kInt8Unit = 0x1p-24f;  // factor for sums over int8 numbers

template <class Number>
constexpr int kDeep = sizeof(Number) < sizeof(float) ? 2 : 1;  // numbers of a column in a slice
template <class Number>
constexpr int kSlice = kDeep<Number> * kPanel;  // numbers in a slice
template <class Number>
constexpr int kRegister = kDeep<Number> * kLanes;  // numbers of 16 columns in a slice

inline int panels_of(int columns) { return (columns + kPanel - 1) / kPanel; }
inline std::size_t panel_size(int depth) { return std::size_t(depth) * kPanel; }  // in numbers

// Returns the index of a column's first number in a slice.
template <class Weight>
constexpr int place_of(int column) {
  return sizeof(Weight) == 1 ? column % kLanes * 4 + column / kLanes * 2 : kDeep<Weight> * column;
}

// Prefetches the slice `bytes` after the slice that is multiplied.
template <_mm_hint Cache>
struct Ahead {
  std::size_t bytes;

  template <class Weight>
  void operator()(const Weight* slice) const {
    for (std::size_t byte = 0; byte < kSlice<Weight> * sizeof(Weight); byte += 64)
      _mm_prefetch((const char*)slice + bytes + byte, Cache);
  }
};

}  // namespace motet
