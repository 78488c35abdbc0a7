// Puts rows of bf16 into the panels that gemm.h multiplies.
#pragma once

#include "turn.h"  // from avx512 or avx2

namespace motet {

constexpr bf16 kZeros[2 * kLanes] = {};

// Writes 16 columns of a panel, [depth / 2][16][2] at stride 32 pairs, from 16 rows of `depth` (a multiple of 32).
// row(i) returns a pointer, or null for a row of zeros.
template <class Row>
inline void pack_columns(bf16* to, int depth, Row row) {
  for (int begin = 0; begin < depth; begin += 2 * kLanes) {
    const bf16* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const bf16* from = row(i);
      rows[i] = from ? from + begin : kZeros;
    }
    pack_block(to + std::size_t(begin / 2) * kPair, rows);
  }
}

}  // namespace motet
