// Packs rows of bf16 or float32 into panels (panel.h).
#pragma once

#include "transpose.h"  // from avx512 or avx2

namespace motet {

template <class Number>
constexpr Number kZeros[kPanel] = {};

// Writes one slice of a panel from 32 consecutive numbers of a row.
inline void pack_slice(float* to, const float* const rows[1]) {
  for (int at = 0; at < kPanel; at += kLanes) store(to + at, load(rows[0] + at));
}

// Writes 16 columns of a panel, [depth / kDeep][16][kDeep] with the stride of a slice, from 16 rows of `depth` numbers
// (a multiple of 32). row(i) returns a pointer to row i, or null for a row of zeros.
template <class Number, class Row>
inline void pack_columns(Number* to, int depth, Row row) {
  for (int begin = 0; begin < depth; begin += kRegister<Number>) {
    const Number* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const Number* from = row(i);
      rows[i] = from ? from + begin : kZeros<Number>;
    }
    pack_block(to + panel_size(begin), rows);
  }
}

}  // namespace motet
