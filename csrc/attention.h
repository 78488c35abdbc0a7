// Attention of one layer over paged keys and values: first the trunks, each key for all rows that share it, then what
// each row has alone.
//
// A stretch of a table is packed for the matrix unit, multiplied with the queries of up to kMaxLines lines, and
// weighed. The result is merged into that of the stretches before it (online softmax, as in FlashAttention). Stretches
// are cut at fixed places of a table and merged in their order, so a row's bits depend only on its own keys, whichever
// threads read them, and whatever rows they are read for besides (`trunks.h` says who reads with whom).
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"
#include "team.h"
#include "trunks.h"

namespace motet {

// Keys [begin, end) of a table, for one key head.
struct Keys {
  int table = 0, begin = 0, end = 0, kv_head = 0;

  int count() const { return end - begin; }
};

// Returns the keys in one stretch of a table that has `keys` keys; none if the table ends before.
inline Keys keys_in(int table, int stretch, int keys, int kv_head) {
  const int begin = std::min(stretch * kStretch, keys);
  return {table, begin, std::min(begin + kStretch, keys), kv_head};
}

template <class Number>
class Reader;

template <class Number>
class Attention {
 public:
  // Cuts a step into tasks. Must be called before the first layer.
  void prepare(const Model& model, const Batch& batch, int num_threads);

  // queries [kv_heads][rows][heads / kv_heads][head_dim] -> output [rows][heads * head_dim]
  void run(const Model& model, const Layer& layer, const Batch& batch, const Number* queries, Number* output,
           Team& team);

 private:
  friend class Reader<Number>;

  // Some rows of a span, for one key head.
  struct Task {
    const Span* span;
    int row_begin, row_end, kv_head;
    std::size_t states;  // where the states of the span's trunk begin; kOwn: the task reads the trunk itself
  };

  struct Workspace {
    std::vector<std::size_t> offsets;  // offsets in the pools of a stretch's rows, then of what is probably read next
    const Number* next = nullptr;      // the first key of what is probably read next
    int fetched = 0;                   // how many keys of that are in the L2 cache already
    std::vector<Number> keys, values;  // the stretch, packed
    std::vector<float> scores;         // [kMaxRows][kStretch]
    std::vector<Number> weights;       // [kMaxRows][kStretch]: factors of the values
    std::vector<float> fresh, total;   // states of kMaxLines lines
    std::vector<Number> queries;       // of kMaxLines lines, from several spans
    std::vector<int> rows;             // of these spans
  };

  void cut(const Model& model, const Span& span, std::size_t states, int num_threads);
  void finish(const Model& model, const Layer& layer, const Batch& batch, const Number* queries, const Task& task,
              Workspace& space, Number* output);

  Trunks trunks_;                // what threads read for each other
  std::vector<Task> row_tasks_;  // rows whose output is computed
  std::vector<Workspace> workspaces_;
  std::vector<float> trunk_states_;
};

}  // namespace motet
