// The layout of a matrix product's weights in memory: panels of 32 columns. In a panel, pairs of depth follow each
// other:
//
//     panel[pair][column / 16][column % 16][2]        128 bytes a pair
//
// B may be int8 numbers, with a scale for every column: the two of a column, then the two of the column 16 further on.
//
//     panel[pair][column % 16][column / 16][2]        64 bytes a pair
//
// In registers they become floats (or bf16) that are 2^24 times as large, which is exact. So one kernel multiplies both
// kinds.
#pragma once

#include "vectors.h"

namespace motet {

constexpr int kPanel = 32;
constexpr int kPair = 2 * kPanel;      // numbers in a pair of a panel
constexpr float kInt8Unit = 0x1p-24f;  // factor for sums over int8 numbers

inline int panels_of(int columns) { return (columns + kPanel - 1) / kPanel; }
inline std::size_t panel_size(int depth) { return std::size_t(depth) * kPanel; }  // in numbers

// Returns the place of a column's two numbers in a pair of a panel.
template <class Weight>
constexpr int place_of(int column) {
  return sizeof(Weight) == sizeof(bf16) ? 2 * column : column % kLanes * 4 + column / kLanes * 2;
}

// Prefetches the pair that lies `ahead` numbers after `from`, while the pair at `from` is multiplied.
template <class Weight>
inline void fetch_pair(const Weight* from, std::size_t ahead) {
  for (std::size_t byte = 0; byte < kPair * sizeof(Weight); byte += 64)
    _mm_prefetch((const char*)(from + ahead) + byte, _MM_HINT_T1);
}

}  // namespace motet
