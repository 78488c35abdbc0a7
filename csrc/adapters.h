// LoRA adapters (Hu et al., 2021): low-rank changes of products, for the rows of some groups.
//
//     y = x * W + (x * A) * B
//
// The products with A of all rows are computed first, in a loop of their own. The loop over the columns of W then adds
// the products with B before it passes its results on. A row's bits depend only on its own adapter: both products sum
// each number with one accumulator (gemm.h), for any number of rows. Rows without an adapter are not touched.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "logit_rows.h"
#include "thread_pool.h"

namespace motet {

template <class Number>
class Adapters {
 public:
  // Called at the start of a step.
  void prepare(const Batch& batch);

  // Called before the last layer continues with the rows whose logits are requested.
  void keep(const LogitRows& rows);

  // Multiplies the input [rows][depth] of a product with the A of each row's adapter. Returns false, and does nothing,
  // if no adapter changes this product.
  bool start(const Linear& linear, const Number* input, int rows, ThreadPool& threads);

  // Computes the changes of panels [begin, begin + count) of the product of the last `start`.
  void compute(int begin, int count, int thread);

  // Adds the last computed change to 32 results of a row. `panel`: counted from `begin`.
  void add(int row, int panel, int thread, Floats& left, Floats& right) const {
    if (!is_changed_[row]) return;
    const float* change = changes_[thread].data() + std::size_t(row) * stride_ + panel * kPanel;
    left = left + load(change);
    right = right + load(change + kLanes);
  }

 private:
  static constexpr int kRowsOfTask = 2 * kMaxRows;
  static constexpr int kMaxPanels = 8;  // of a call of `compute`

  struct Rows {
    int begin, end, adapter;
  };
  struct Part {  // rows whose adapter changes the product
    int begin, end;
    const LowRank* low_rank;
  };
  struct Task {
    int begin, end, panel;
    const LowRank* low_rank;
  };

  void multiply_down(const Task& task, const Number* input, int depth, int thread);
  void multiply_up(const Part& part, int begin, int count, int thread);

  const LowRank* const* low_ranks_ = nullptr;
  std::vector<Rows> rows_;
  std::vector<Part> parts_;
  std::vector<Task> tasks_;
  int width_ = 0;                            // numbers of a row of `low_`
  int stride_ = kMaxPanels * kPanel;         // numbers of a row of `changes_`
  std::vector<std::uint8_t> is_changed_;     // [rows]: 1 if an adapter changes the product of a row
  std::vector<Number> low_;                  // [rows][width_]: x * A
  std::vector<std::vector<float>> changes_;  // for each thread, [rows][stride_]
  std::vector<std::vector<float>> sums_;     // for each thread, scratch for sums of products (see `product`)
};

template <class Number>
void Adapters<Number>::prepare(const Batch& batch) {
  rows_.clear();
  low_ranks_ = batch.low_ranks;
  if (!batch.adapters) return;
  for (int row = 0; row < batch.num_rows; ++row) {
    const int adapter = batch.adapters[row];
    if (adapter < 0) continue;
    if (!rows_.empty() && rows_.back().end == row && rows_.back().adapter == adapter)
      ++rows_.back().end;
    else
      rows_.push_back({row, row + 1, adapter});
  }
}

template <class Number>
void Adapters<Number>::keep(const LogitRows& rows) {
  for (Rows& each : rows_) each = {rows.index_of(each.begin), rows.index_of(each.end), each.adapter};
}

template <class Number>
bool Adapters<Number>::start(const Linear& linear, const Number* input, int rows, ThreadPool& threads) {
  if (rows_.empty() || linear.number == 0) return false;
  parts_.clear();
  tasks_.clear();
  width_ = 0;
  for (const Rows& each : rows_) {
    const LowRank* low_rank = low_ranks_[each.adapter] + linear.number;
    if (low_rank->width == 0 || each.begin == each.end) continue;
    parts_.push_back({each.begin, each.end, low_rank});
    width_ = std::max(width_, low_rank->width);
    for (int begin = each.begin; begin < each.end; begin += kRowsOfTask)
      for (int panel = 0; panel < panels_of(low_rank->width); ++panel)
        tasks_.push_back({begin, std::min(each.end, begin + kRowsOfTask), panel, low_rank});
  }
  if (parts_.empty()) return false;
  is_changed_.assign(rows, 0);
  for (const Part& part : parts_) std::fill(is_changed_.begin() + part.begin, is_changed_.begin() + part.end, 1);
  if (low_.size() < std::size_t(rows) * width_) low_.resize(std::size_t(rows) * width_);
  changes_.resize(threads.size());
  sums_.resize(threads.size());
  for (auto& changes : changes_)
    if (changes.size() < std::size_t(rows) * stride_) changes.resize(std::size_t(rows) * stride_);
  for (auto& sums : sums_) sums.resize(kRowsOfTask * kPanel);
  threads.parallel_for(int(tasks_.size()), [&](int task, int thread) {
    multiply_down(tasks_[task], input, linear.depth, thread);
  });
  return true;
}

template <class Number>
void Adapters<Number>::multiply_down(const Task& task, const Number* input, int depth, int thread) {
  const Number* panel = static_cast<const Number*>(task.low_rank->down) + task.panel * panel_size(depth);
  product(task.end - task.begin, input + std::size_t(task.begin) * depth, depth, panel, panel_size(depth), 1, depth,
          sums_[thread].data(), [&](int row, int, Floats left, Floats right) {
            Number* to = low_.data() + std::size_t(task.begin + row) * width_ + task.panel * kPanel;
            store(to, left);
            store(to + kLanes, right);
          });
}

template <class Number>
void Adapters<Number>::compute(int begin, int count, int thread) {
  for (const Part& part : parts_) multiply_up(part, begin, count, thread);
}

// Panels use different numbers of x * A if the product is fused. Adjacent panels with the same numbers are multiplied
// at once.
template <class Number>
void Adapters<Number>::multiply_up(const Part& part, int begin, int count, int thread) {
  const LowRank& low_rank = *part.low_rank;
  float* changes = changes_[thread].data() + std::size_t(part.begin) * stride_;
  for (int panel = 0, stop; panel < count; panel = stop) {
    const std::int32_t* window = low_rank.windows + 3 * (begin + panel);
    for (stop = panel + 1; stop < count && std::equal(window, window + 2, low_rank.windows + 3 * (begin + stop));)
      ++stop;
    const auto write = [&](int row, int p, Floats left, Floats right) {
      float* to = changes + std::size_t(row) * stride_ + (panel + p) * kPanel;
      store(to, left);
      store(to + kLanes, right);
    };
    if (window[0] == window[1]) {
      for (int row = 0; row < part.end - part.begin; ++row)
        for (int p = 0; p < stop - panel; ++p) write(row, p, all(0.0f), all(0.0f));
      continue;
    }
    const Number* up = static_cast<const Number*>(low_rank.up) + panel_size(window[2]);
    const Number* low = low_.data() + std::size_t(part.begin) * width_ + window[0];
    const int rows = part.end - part.begin, depth = window[1] - window[0];
    if (rows <= kFewRowsOfTile)  // limited by memory bandwidth
      product(rows, low, width_, up, panel_size(depth), stop - panel, depth, sums_[thread].data(), write);
    else
      product_in_cache(rows, low, width_, up, panel_size(depth), stop - panel, depth, [] {}, write);
  }
}

}  // namespace motet
