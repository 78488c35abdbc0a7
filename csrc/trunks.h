// Who reads which keys of the trunks in a step, and with whom.
//
// Spans whose block tables share blocks, such as requests with one prompt or with a common beginning, read these blocks
// together. Each stretch is planned by itself, so trunks may share any of them, as the branches of a tree do:
//
//     stretch               0              1              2
//     span A, B       [ a a a a a ]  [ b b b b b ]  [ c c c ]       one reading each for A and B
//     span C          [ a a a a a ]  [ b b d d d ]  [ e e e ]       C joins A and B in 0; in 1 it follows them, and
//                                                                   packs only d; in 2 it reads alone
//
// The plan is made once a step and holds for all layers and heads. It changes no bits: a row is merged from the same
// stretches in the same order, whoever reads beside it.
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

namespace motet {

constexpr int kStretch = 256;  // keys; every block size divides it
constexpr int kMaxLines = 96;  // most lines of a reading; a line is one query head of one row
constexpr std::size_t kOwn = ~std::size_t(0);

inline int group_size(const Model& model) { return model.heads / model.kv_heads; }
inline int stretches_of(int keys) { return (keys + kStretch - 1) / kStretch; }

// Size in floats of a line's state over the keys read so far: the sum of values [head_dim] with weights
// 2^(score - best), then best, then the sum of the weights.
inline int state_size(const Model& model) { return model.head_dim + 2; }

// Rows of one span in a reading.
struct Part {
  const Span* span;
  int row_begin, row_end;
  int keys;            // number of the trunk's keys in the stretch
  int common;          // how many of them, from the first on, the part before it in the reading has too
  std::size_t states;  // where the states of the span's trunk begin
};

// Parts that a thread reads one after the other, for one key head. They are sorted so that equal keys are neighbours.
struct Reading {
  int part_begin, part_end;
  int stretch;
};

class Trunks {
 public:
  void prepare(const Model& model, const Batch& batch, int num_threads);

  const std::vector<Part>& parts() const { return parts_; }
  const std::vector<Reading>& readings() const { return readings_; }

  // Returns where the states of a span's trunk begin; kOwn: its trunk is in no reading.
  std::size_t states(int span) const { return states_[span]; }
  std::size_t num_states() const { return num_states_; }  // in floats

  // Number of trunk keys read, where those that spans read together count once.
  std::int64_t keys_read() const { return keys_read_; }

 private:
  // The part of a span's block table that one stretch covers.
  struct Slice {
    const std::int32_t* blocks;
    int keys, span;
  };

  void slice(const Model& model, const Batch& batch, int height);
  void place(const Model& model, const Batch& batch, int num_threads);
  void read_together(const Model& model, const Batch& batch, int num_threads);
  void read_alone(const Span& span, std::size_t states, int height);
  void join(const Batch& batch, const Slice* begin, const Slice* end, const int* common, int stretch, int height);

  std::vector<Part> parts_;
  std::vector<Reading> readings_;
  std::vector<std::size_t> states_;  // of each span
  std::size_t num_states_;
  std::int64_t keys_read_;
  std::vector<Slice> slices_;        // of the spans that may share, stretch after stretch, sorted in each
  std::vector<int> common_;          // for each slice, how many keys the one before it has too
  std::vector<int> stretch_begins_;  // where each stretch begins in `slices_`, and where the last one ends
  std::vector<char> shares_;         // for each span, 1 if a slice of it has keys in common with another
};

// How many rows a reading may have.
inline int height_of(const Model& model) { return std::max(1, kMaxLines / group_size(model)); }

// How many tasks keep all threads busy until the end.
inline int enough_for(int num_threads) { return 4 * num_threads; }

// True if a span's rows make too few tasks to keep all threads busy.
inline bool is_few(const Model& model, int rows, int num_threads) {
  return (rows + height_of(model) - 1) / height_of(model) * model.kv_heads < enough_for(num_threads);
}

}  // namespace motet
