// Plans which keys of the trunks are read for which rows in a step.
//
// Spans whose block tables share blocks, such as requests with the same prompt or with a common prefix, read these
// blocks together. Each stretch is planned separately, so trunks can share any stretches, like the branches of a tree:
//
//     stretch               0              1              2
//     span A, B       [ a a a a a ]  [ b b b b b ]  [ c c c ]       one reading per stretch for A and B
//     span C          [ a a a a a ]  [ b b d d d ]  [ e e e ]       0: C joins A and B; 1: C comes after A and B, and
//                                                                   packs only d; 2: C has a reading of its own
//
// The plan is made once per step and is used for all layers and heads. It does not change any bits, because a row is
// merged from the same stretches in the same order, independent of the rows that share them.
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"
#include "panel.h"

namespace motet {

constexpr int kStretch = 256;  // number of keys; every block size divides it
constexpr int kMaxLines = 96;  // maximum number of lines of a reading; a line is one query head of one row
constexpr std::size_t kNotShared = ~std::size_t(0);

inline int group_size(const Model& model) { return model.heads / model.kv_heads; }
inline int stretches_of(int keys) { return (keys + kStretch - 1) / kStretch; }

// Number of columns of a head's values in panels. Columns after `head_dim` have any numbers, and are not used.
inline int padded_dim(const Model& model) { return panels_of(model.head_dim) * kPanel; }

// Size in floats of a line's state over the keys read so far: the sum [padded_dim] of the values with weights
// 2^(score - best), then the best score, then the sum of the weights.
inline int state_size(const Model& model) { return padded_dim(model) + 2; }

// Rows of one span in a reading.
struct Part {
  const Span* span;
  int row_begin, row_end;
  int keys;            // number of the trunk's keys in the stretch
  int common;          // number of leading keys in common with the previous part of the reading
  std::size_t states;  // index of the first state of the span's trunk
};

// Parts [part_begin, part_end) that a thread reads one after the other, for one key head. They are sorted so that parts
// with equal keys are adjacent.
struct Reading {
  int part_begin, part_end;
  int stretch;
};

class Trunks {
 public:
  // Plans a step.
  void prepare(const Model& model, const Batch& batch, int num_threads);

  const std::vector<Part>& parts() const { return parts_; }
  const std::vector<Reading>& readings() const { return readings_; }

  // Returns the index of the first state of a span's trunk, or kNotShared if its trunk is in no reading.
  std::size_t states(int span) const { return states_[span]; }
  std::size_t num_states() const { return num_states_; }  // in floats

  // Returns the number of keys of the groups' trunks that are read. Keys that spans read together count once.
  std::int64_t keys_read() const { return keys_read_; }

 private:
  // The section of a span's block table for one stretch.
  struct Slice {
    const std::int32_t* blocks;
    int keys, span;
  };

  void slice(const Model& model, const Batch& batch, int height);
  void assign_states(const Model& model, const Batch& batch, int num_threads);
  void read_together(const Model& model, const Batch& batch, int num_threads);
  void read_alone(const Span& span, std::size_t states, int height);
  void join(const Batch& batch, const Slice* begin, const Slice* end, const int* common, int stretch, int height);

  std::vector<Part> parts_;
  std::vector<Reading> readings_;
  std::vector<std::size_t> states_;  // result of `states` for each span
  std::size_t num_states_;
  std::int64_t keys_read_;
  std::vector<Slice> slices_;        // of the spans that can share, by stretch, sorted in each stretch
  std::vector<int> common_;          // for each slice, number of leading keys in common with the previous slice
  std::vector<int> stretch_begins_;  // index of the first slice of each stretch in `slices_`, then its size
  std::vector<char> shares_;         // for each span, 1 if one of its slices has keys in common with another slice
};

// Returns the maximum number of rows of a reading.
inline int max_rows_of(const Model& model) { return std::max(1, kMaxLines / group_size(model)); }

// Returns the number of tasks that keeps all threads busy until the end.
inline int busy_tasks(int num_threads) { return 4 * num_threads; }

// Returns true if a span's rows are too few tasks to keep all threads busy.
inline bool has_few_tasks(const Model& model, int rows, int num_threads) {
  return (rows + max_rows_of(model) - 1) / max_rows_of(model) * model.kv_heads < busy_tasks(num_threads);
}

}  // namespace motet
