#include "logit_rows.h"

#include <algorithm>

namespace motet {

void LogitRows::prepare(const Batch& batch) {
  num_before_.assign(batch.num_rows + 1, 0);
  for (int i = 0; i < batch.num_logits; ++i) num_before_[batch.logit_rows[i] + 1] = 1;
  for (int row = 0; row < batch.num_rows; ++row) num_before_[row + 1] += num_before_[row];
  if (are_all_rows()) return;
  positions_.clear();
  for (int row = 0; row < batch.num_rows; ++row)
    if (contains(row)) positions_.push_back(batch.positions[row]);
  logit_rows_.clear();
  for (int i = 0; i < batch.num_logits; ++i) logit_rows_.push_back(index_of(batch.logit_rows[i]));
  spans_.clear();
  pieces_.clear();
  for (int i = 0; i < batch.num_spans; ++i) add_span(batch.spans[i], batch.pieces);
  batch_ = batch;
  batch_.num_rows = num_rows();
  batch_.num_spans = int(spans_.size());
  batch_.positions = positions_.data();
  batch_.logit_rows = logit_rows_.data();
  batch_.spans = spans_.data();
  batch_.pieces = pieces_.data();
  batch_.trunk_keys_read = &trunk_keys_read_;
}

// Adds the requested rows of a span. Requested rows that are consecutive in a piece become one piece.
void LogitRows::add_span(const Span& span, const Piece* pieces) {
  if (index_of(span.row_begin) == index_of(span.row_end)) return;
  const int first = int(pieces_.size());
  for (int i = span.piece_begin; i < span.piece_end; ++i) {
    const Piece& piece = pieces[i];
    for (int row = piece.row_begin, stop; row < piece.row_end; row = std::max(stop, row + 1)) {
      for (stop = row; stop < piece.row_end && contains(stop);) ++stop;
      if (stop > row)
        pieces_.push_back({index_of(row), index_of(stop), piece.first + row - piece.row_begin, piece.table});
    }
  }
  spans_.push_back({index_of(span.row_begin), index_of(span.row_end), first, int(pieces_.size()), span.trunk_keys,
                    span.trunk_table});
}

}  // namespace motet
