// Attention of one layer over paged keys and values: first over the trunks, where each key is read once for all rows
// that share it, then over the keys that each row has alone.
//
// A stretch of a table is packed for the matrix unit and multiplied with the queries of up to kMaxLines lines. Then the
// softmax weights are applied, and the result is merged into the result of the previous stretches (online softmax, as
// in FlashAttention). Stretches are cut at fixed positions of a table and merged in their order. A row's bits therefore
// depend only on its own keys, and not on the threads that read them or on the rows that share them (`trunks.h` plans
// the sharing).
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"
#include "thread_pool.h"
#include "trunks.h"

namespace motet {

// Keys [begin, end) of a table, for one key head.
struct Keys {
  int table = 0, begin = 0, end = 0, kv_head = 0;

  int count() const { return end - begin; }
};

// Returns the keys in one stretch of a table with `keys` keys; empty if the table ends before the stretch.
inline Keys keys_in(int table, int stretch, int keys, int kv_head) {
  const int begin = std::min(stretch * kStretch, keys);
  return {table, begin, std::min(begin + kStretch, keys), kv_head};
}

template <class Number>
class Reader;

template <class Number>
class Attention {
 public:
  // Cuts a step into tasks. Must be called once per step, before the first layer.
  void prepare(const Model& model, const Batch& batch, int num_threads);

  // queries [kv_heads][rows][heads / kv_heads][head_dim] -> output [rows][heads * head_dim]
  void run(const Model& model, const Layer& layer, const Batch& batch, const Number* queries, Number* output,
           ThreadPool& threads);

 private:
  friend class Reader<Number>;

  // Some rows of a span, for one key head.
  struct Task {
    const Span* span;
    int row_begin, row_end, kv_head;
    std::size_t states;  // index of the first state of the span's trunk; kNotShared: the task reads the trunk itself
  };

  struct Workspace {
    std::vector<std::size_t> offsets;  // offsets in the pools of a stretch's keys, then of the keys of `next`
    const Number* next = nullptr;      // first of the keys that the thread will probably read next
    int fetched = 0;                   // number of these keys that are in the L2 cache already
    std::vector<Number> keys, values;  // the stretch, packed
    std::vector<float> scores;         // [kMaxRows][kStretch]
    std::vector<Number> weights;       // [kMaxRows][kStretch]: softmax weights
    std::vector<float> fresh, total;   // states of kMaxLines lines
    std::vector<Number> queries;       // of kMaxLines lines, from several spans
    std::vector<int> rows;             // row of each of these queries
  };

  void cut(const Model& model, const Span& span, std::size_t states, int num_threads);
  void finish(const Model& model, const Layer& layer, const Batch& batch, const Number* queries, const Task& task,
              Workspace& space, Number* output);

  Trunks trunks_;                // plan of the shared reads
  std::vector<Task> row_tasks_;  // tasks that compute the output of rows
  std::vector<Workspace> workspaces_;
  std::vector<float> trunk_states_;
};

}  // namespace motet
