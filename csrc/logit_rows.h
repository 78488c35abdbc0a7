// The rows of a step whose logits are requested.
//
// All other rows, which include nearly all rows of a prompt, are done as soon as the last layer has stored their keys
// and values, because nothing reads their outputs. The last layer therefore continues with a batch that has only the
// requested rows. Their bits do not change, because a row's bits never depend on other rows.
#pragma once

#include <vector>

#include "model.h"

namespace motet {

class LogitRows {
 public:
  void prepare(const Batch& batch);

  // True if every row is requested, as in a step that only decodes.
  bool are_all_rows() const { return num_rows() == int(num_before_.size()) - 1; }

  int num_rows() const { return num_before_.back(); }
  bool contains(int row) const { return num_before_[row] < num_before_[row + 1]; }

  // Returns a row's index among the requested rows.
  int index_of(int row) const { return num_before_[row]; }

  // The inputs of attention and logits for the requested rows. Points to memory of this object until the next
  // `prepare`.
  const Batch& batch() const { return batch_; }

 private:
  void add_span(const Span& span, const Piece* pieces);

  std::vector<int> num_before_;  // [num_rows + 1]: number of requested rows before each row
  std::vector<std::int32_t> positions_, logit_rows_;
  std::vector<Span> spans_;
  std::vector<Piece> pieces_;
  std::int64_t trunk_keys_read_;  // unused; the number of the complete batch is reported
  Batch batch_;
};

}  // namespace motet
