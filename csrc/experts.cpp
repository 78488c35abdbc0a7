#include "experts.h"

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "gemm.h"
#include "strips.h"

namespace motet {
namespace {

constexpr int kRouterRows = 24;  // rows of the router's product per iteration

int columns_of(const Linear& router) { return panels_of(router.columns) * kPanel; }

// Replaces logits by their softmax.
void softmax(float* logits, int count) {
  Floats highest = all(-kInfinity), total = all(0.0f);
  for (int at = 0; at < count; at += kLanes)
    highest = max(choose(lanes(0, count - at), load(logits + at), all(-kInfinity)), highest);
  const Floats top = all(reduce_max(highest));
  for (int at = 0; at < count; at += kLanes) {
    const Floats x = exp2_of_negative((load(logits + at) - top) * all(kLog2E));
    total = total + choose(lanes(0, count - at), x, all(0.0f));
    store(logits + at, x, lanes(0, count - at));
  }
  const Floats sum_of_all = all(sum(total));
  for (int at = 0; at < count; at += kLanes) store(logits + at, load(logits + at) / sum_of_all, lanes(0, count - at));
}

// Returns the index of the greatest number, and -infinity takes its place. Of equal numbers, the first one is returned.
// Numbers that are NaN come after all others.
int take_greatest(float* numbers, int count) {
  int best = 0;
  while (best < count - 1 && numbers[best] == -kInfinity) ++best;
  for (int i = best + 1; i < count; ++i)
    if (numbers[i] > numbers[best] || (numbers[best] != numbers[best] && numbers[i] > -kInfinity)) best = i;
  numbers[best] = -kInfinity;
  return best;
}

// Sets the numbers of all groups to -infinity except of the groups with the greatest sums of their two best numbers.
void keep_groups(const Experts& experts, float* ranks) {
  const int size = experts.count / experts.groups;
  std::vector<float> totals(experts.groups);
  for (int group = 0; group < experts.groups; ++group) {
    float first = -kInfinity, second = -kInfinity;
    for (int i = group * size; i < (group + 1) * size; ++i) {
      second = std::max(second, std::min(first, ranks[i]));
      first = std::max(first, ranks[i]);
    }
    totals[group] = first + second;
  }
  std::vector<bool> kept(experts.groups);
  for (int i = 0; i < experts.top_groups; ++i) kept[take_greatest(totals.data(), experts.groups)] = true;
  for (int i = 0; i < experts.count; ++i)
    if (!kept[i / size]) ranks[i] = -kInfinity;
}

// GPT-OSS: (up + 1) * gate * sigmoid(alpha * gate), with limits.
Floats clamped_gate(const Experts& experts, Floats gate, Floats up) {
  const Floats limit = all(experts.limit), low = all(-experts.limit);
  gate = min(limit, gate);  // NaN stays NaN
  up = max(low, min(limit, up));
  return (up + all(1.0f)) * (gate * sigmoid(gate * all(experts.alpha)));
}

}  // namespace

template <class Number>
void ExpertLayer<Number>::run(const Layer& layer, const Number* input, int rows, float* output, ThreadPool& threads) {
  const Experts& experts = layer.experts;
  prepare(experts, rows, threads.size());
  route(experts, input, rows, threads);
  assign(experts, rows);
  gather(experts, input, threads);
  gate(layer, threads);
  add_up(experts, rows, output, threads);
}

template <class Number>
float ExpertLayer<Number>::shared_factor(const Experts& experts, int row) const {
  if (!experts.shared) return 1.0f;
  return first(sigmoid(all(logits_[std::size_t(row) * columns_of(experts.router) + experts.shared])));
}

template <class Number>
void ExpertLayer<Number>::prepare(const Experts& experts, int rows, int num_threads) {
  const std::size_t places = std::size_t(rows) * experts.per_row, columns = columns_of(experts.router);
  grow(logits_, rows * columns);
  grow(ranks_, rows * columns);
  grow(selected_, places);
  grow(weights_, places);
  grow(rows_, places);
  grow(row_weights_, places);
  grow(gathered_, places * experts.gate_up.depth);
  grow(gated_, places * experts.down.depth);
  wide_.resize(num_threads);
  sums_.resize(num_threads);
  for (auto& wide : wide_) grow(wide, std::is_same_v<Number, float> ? 0 : kRouterRows * experts.router.depth);
  for (auto& sums : sums_) grow(sums, std::max(rows, kRouterRows) * kMaxStrip * kPanel);
}

// Computes the router's results for all rows, and selects the experts of each row.
template <class Number>
void ExpertLayer<Number>::route(const Experts& experts, const Number* input, int rows, ThreadPool& threads) {
  const int panels = panels_of(experts.router.columns), depth = experts.router.depth;
  const int blocks = (rows + kRouterRows - 1) / kRouterRows;
  threads.parallel_for(blocks * panels, [&](int piece, int thread) {
    const int begin = piece / panels * kRouterRows, count = std::min(kRouterRows, rows - begin), panel = piece % panels;
    const Number* from = input + std::size_t(begin) * depth;
    const float* wide;
    if constexpr (std::is_same_v<Number, float>) {
      wide = from;
    } else {
      for (int at = 0; at < count * depth; at += kLanes) store(wide_[thread].data() + at, load(from + at));
      wide = wide_[thread].data();
    }
    const float* weights = static_cast<const float*>(experts.router.panels) + panel * panel_size(depth);
    product(count, wide, depth, weights, panel_size(depth), 1, depth, sums_[thread].data(),
            [&](int row, int, Floats left, Floats right) {
              float* to = logits_.data() + std::size_t(begin + row) * columns_of(experts.router) + panel * kPanel;
              store(to, finished(experts.router, panel * kPanel, left));
              store(to + kLanes, finished(experts.router, panel * kPanel + kLanes, right));
            });
  });
  threads.parallel_for((rows + kFewRows - 1) / kFewRows, [&](int piece, int) {
    for (int row = piece * kFewRows; row < std::min(rows, (piece + 1) * kFewRows); ++row) select(experts, row);
  });
}

// Selects the experts of a row, and computes their weights.
template <class Number>
void ExpertLayer<Number>::select(const Experts& experts, int row) {
  const std::size_t first_column = std::size_t(row) * columns_of(experts.router);
  float *scores = logits_.data() + first_column, *ranks = ranks_.data() + first_column;
  const int count = experts.count, per_row = experts.per_row;
  if (experts.scoring == kSoftmaxOfLogits)
    softmax(scores, count);
  else
    for (int at = 0; at < count; at += kLanes)
      store(scores + at, sigmoid(load(scores + at)), lanes(0, count - at));
  for (int i = 0; i < count; ++i) ranks[i] = scores[i] + (experts.correction ? experts.correction[i] : 0.0f);
  if (experts.top_groups < experts.groups) keep_groups(experts, ranks);
  int* selected = selected_.data() + std::size_t(row) * per_row;
  float *weights = weights_.data() + std::size_t(row) * per_row, total = 0.0f;
  for (int i = 0; i < per_row; ++i) {
    selected[i] = take_greatest(ranks, count);
    weights[i] = scores[selected[i]];
    total += weights[i];
  }
  const float divisor = experts.min_total == 0.0f ? 1.0f : std::max(total, experts.min_total);
  for (int i = 0; i < per_row; ++i) weights[i] = weights[i] / divisor * experts.scale;
}

// Assigns a place to each pair of a row and one of its experts, ordered by expert and then by row.
template <class Number>
void ExpertLayer<Number>::assign(const Experts& experts, int rows) {
  const int places = rows * experts.per_row;
  ends_.assign(experts.count, 0);
  for (int i = 0; i < places; ++i) ++ends_[selected_[i]];
  active_.clear();
  int begin = 0;
  for (int expert = 0; expert < experts.count; ++expert) {
    const int end = begin + ends_[expert];
    if (end > begin) active_.push_back({expert, begin, end});
    ends_[expert] = begin;
    begin = end;
  }
  for (int i = 0; i < places; ++i) {
    const int place = ends_[selected_[i]]++;
    rows_[place] = i / experts.per_row;
    row_weights_[place] = weights_[i];
  }
}

template <class Number>
void ExpertLayer<Number>::gather(const Experts& experts, const Number* input, ThreadPool& threads) {
  const int places = active_.back().end;
  const std::size_t hidden = experts.gate_up.depth;
  threads.parallel_for((places + kFewRows - 1) / kFewRows, [&](int piece, int) {
    for (int place = piece * kFewRows; place < std::min(places, (piece + 1) * kFewRows); ++place)
      std::copy_n(input + rows_[place] * hidden, hidden, gathered_.data() + place * hidden);
  });
}

// Writes the inputs of the down products to `gated_`.
template <class Number>
void ExpertLayer<Number>::gate(const Layer& layer, ThreadPool& threads) {
  const Linear& linear = layer.experts.gate_up;
  const int panels = linear.columns / layer.experts.count / kPanel, strip = strip_of(panels, threads.size());
  const int depth = linear.depth, width = layer.experts.down.depth, activation = layer.activation;
  with_panels<Number>(linear, [&](const auto* all_panels) {
    threads.parallel_for((panels + strip - 1) / strip, [&](int piece, int thread) {
      const int begin = piece * strip, count = std::min(strip, panels - begin);
      for (const Active& active : active_) {
        const std::size_t first = std::size_t(active.expert) * panels + begin;
        product(active.end - active.begin, gathered_.data() + std::size_t(active.begin) * depth, depth,
                all_panels + first * panel_size(depth), panel_size(depth), count, depth, sums_[thread].data(),
                [&](int row, int panel, Floats left, Floats right) {
                  const std::size_t column = (first + panel) * kPanel;
                  const Floats gate = finished(linear, column, left), up = finished(linear, column + kLanes, right);
                  Number* to = gated_.data() + std::size_t(active.begin + row) * width + (begin + panel) * kLanes;
                  if (layer.experts.limit != 0.0f) return store(to, clamped_gate(layer.experts, gate, up));
                  store(to, activate(activation, gate) * up);
                });
      }
    });
  });
}

// Writes the weighted sums of the experts' results.
template <class Number>
void ExpertLayer<Number>::add_up(const Experts& experts, int rows, float* output, ThreadPool& threads) {
  const Linear& linear = experts.down;
  const int hidden = linear.columns / experts.count, depth = linear.depth;
  const int panels = hidden / kPanel, strip = strip_of(panels, threads.size());
  with_panels<Number>(linear, [&](const auto* all_panels) {
    threads.parallel_for((panels + strip - 1) / strip, [&](int piece, int thread) {
      const int begin = piece * strip, count = std::min(strip, panels - begin);
      for (int row = 0; row < rows; ++row)
        std::fill_n(output + std::size_t(row) * hidden + begin * kPanel, count * kPanel, 0.0f);
      for (const Active& active : active_) {
        const std::size_t first = std::size_t(active.expert) * panels + begin;
        product(active.end - active.begin, gated_.data() + std::size_t(active.begin) * depth, depth,
                all_panels + first * panel_size(depth), panel_size(depth), count, depth, sums_[thread].data(),
                [&](int row, int panel, Floats left, Floats right) {
                  const std::size_t column = (first + panel) * kPanel;
                  const int place = active.begin + row;
                  float* to = output + std::size_t(rows_[place]) * hidden + (begin + panel) * kPanel;
                  const Floats weight = all(row_weights_[place]);
                  store(to, fma(finished(linear, column, left), weight, load(to)));
                  store(to + kLanes, fma(finished(linear, column + kLanes, right), weight, load(to + kLanes)));
                });
      }
    });
  });
}

template class ExpertLayer<bf16>;
template class ExpertLayer<float>;

}  // namespace motet
