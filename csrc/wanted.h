// The rows of a step whose logits are wanted.
//
// Other rows, nearly all of a prompt's, are done once the last layer has stored their keys and values: nothing reads
// what they would become. So that layer goes on with a batch of the wanted rows alone. Their bits stay the same, as
// always when a row has other rows beside it.
#pragma once

#include <vector>

#include "model.h"

namespace motet {

class Wanted {
 public:
  void prepare(const Batch& batch);

  // True if no row can be left out, as in a step that only writes answers.
  bool all() const { return num_rows() == int(before_.size()) - 1; }

  int num_rows() const { return before_.back(); }
  bool has(int row) const { return before_[row] < before_[row + 1]; }

  // Returns a row's place among the wanted ones.
  int place(int row) const { return before_[row]; }

  // The wanted rows alone: what their attention and logits need.
  const Batch& batch() const { return batch_; }

 private:
  void take(const Span& span, const Piece* pieces);

  std::vector<int> before_;  // for each row, and behind the last one, the number of wanted rows before it
  std::vector<std::int32_t> positions_, logit_rows_;
  std::vector<Span> spans_;
  std::vector<Piece> pieces_;
  std::int64_t trunk_keys_read_;  // not told: the whole batch's number is
  Batch batch_;
};

}  // namespace motet
