#include "attention.h"

#include <algorithm>

#include "gemm.h"
#include "pack.h"

namespace motet {
namespace {

constexpr std::size_t kMaxSharedBytes = 64 << 20;

// Size in floats of a line's state over the keys read so far: the sum of values [head_dim] with weights
// 2^(score - best), then best, then the sum of the weights.
int state_size(const Model& model) { return model.head_dim + 2; }
int group_size(const Model& model) { return model.heads / model.kv_heads; }
int stretches_of(int keys) { return (keys + kStretch - 1) / kStretch; }

struct Weighed {
  float best, mass;
};

// Writes weights 2^(score - best) for scores [begin, end), zeros elsewhere up to `width`. Returns best and their sum.
template <class Number>
Weighed weigh(const float* scores, int begin, int end, int width, Number* weights) {
  const auto seen = [&](int at) {
    return begin <= at && at + kLanes <= end ? lanes(0, kLanes) : lanes(begin - at, end - at);
  };
  Floats best = all(-kInfinity);
  for (int at = 0; at < width; at += kLanes) best = choose(seen(at), max(load(scores + at), best), best);
  const float top = greatest(best);
  Floats mass = all(0.0f);
  for (int at = 0; at < width; at += kLanes) {
    const Floats weight = choose(seen(at), exp2_of_negative(load(scores + at) - all(top)), all(0.0f));
    mass = mass + weight;
    store(weights + at, weight);
  }
  return {top, sum(mass)};
}

float exp2_of_difference(float x, float y) { return first(exp2_of_negative(all(x - y))); }

// Merges a line's state over one stretch into its state over the stretches before.
void merge(float* total, const float* fresh, int head_dim) {
  float &best = total[head_dim], &mass = total[head_dim + 1];
  const float fresh_best = fresh[head_dim], fresh_mass = fresh[head_dim + 1];
  if (fresh_best == -kInfinity) return;  // it saw no key
  if (best == -kInfinity) {
    std::copy(fresh, fresh + head_dim + 2, total);
    return;
  }
  const float top = std::max(best, fresh_best);
  const float old_weight = exp2_of_difference(best, top), new_weight = exp2_of_difference(fresh_best, top);
  for (int at = 0; at < head_dim; at += kLanes) {
    const Floats fresh_sum = load(fresh + at) * all(new_weight);
    store(total + at, fma(load(total + at), all(old_weight), fresh_sum));
  }
  mass = mass * old_weight + fresh_mass * new_weight;
  best = top;
}

// A row sees keys [begin, end) of a table.
struct Seen {
  int begin, end;
};

}  // namespace

// Reads stretches for one task.
template <class Number>
class Reader {
 public:
  using Task = typename Attention<Number>::Task;
  using Workspace = typename Attention<Number>::Workspace;

  Reader(const Model& model, const Layer& layer, const Batch& batch, const Number* queries, const Task& task,
         Workspace& space)
      : model_(model),
        layer_(layer),
        batch_(batch),
        task_(task),
        space_(space),
        keys_(static_cast<const Number*>(layer.keys)),
        values_(static_cast<const Number*>(layer.values)),
        queries_(queries + std::size_t(task.kv_head) * batch.num_rows * group_size(model) * model.head_dim) {}

  // Reads one stretch of the trunk for all rows of the task, and writes their states to `states`, one after the other.
  void trunk(int stretch, float* states) {
    const Span& span = *task_.span;
    const int window = layer_.window;
    const auto seen = [&](int row) {
      return Seen{window ? std::max(0, batch_.positions[row] + 1 - window) : 0, span.trunk_keys};
    };
    read(span.trunk_table, stretch, task_.row_begin, task_.row_end, seen, states);
  }

  // Reads all keys of their own table that rows [begin, end) of a piece see, and merges the states into `total`.
  void piece(const Piece& piece, int begin, int end, float* total) {
    const int window = layer_.window;
    const auto seen = [&](int row) {
      const int last = piece.first + row - piece.row_begin + 1;
      return Seen{window ? std::max(0, last - window) : 0, last};
    };
    for (int stretch = seen(begin).begin / kStretch; stretch < stretches_of(seen(end - 1).end); ++stretch) {
      read(piece.table, stretch, begin, end, seen, space_.fresh.data());
      merge_all(space_.fresh.data(), total, end - begin);
    }
  }

  void merge_all(const float* fresh, float* total, int rows) {
    const int size = state_size(model_);
    for (int line = 0; line < rows * group_size(model_); ++line)
      merge(total + line * size, fresh + line * size, model_.head_dim);
  }

 private:
  // Writes the states of rows [row_begin, row_end) over one stretch of a table.
  template <class See>
  void read(int table, int stretch, int row_begin, int row_end, See seen, float* states) {
    const int group = group_size(model_), lines = (row_end - row_begin) * group, size = state_size(model_);
    const int begin = stretch * kStretch;
    int end = begin;
    for (int row = row_begin; row < row_end; ++row)
      if (const Seen s = seen(row); s.begin < begin + kStretch) end = std::max(end, std::min(s.end, begin + kStretch));
    if (end > begin) pack(table, begin, end);
    const int height = even_tile(lines, kMaxRows);
    for (int line = 0; line < lines; line += height)
      read_lines(row_begin, line, std::min(height, lines - line), begin, end, seen, states + line * size);
  }

  // Reads the packed keys [begin, end) for up to kMaxRows lines; `line` counts from the first one of row `row_begin`.
  template <class See>
  void read_lines(int row_begin, int line, int count, int begin, int end, See seen, float* states) {
    const int group = group_size(model_), dim = model_.head_dim, size = state_size(model_);
    const int visible = std::min(end, seen(row_begin + (line + count - 1) / group).end) - begin;  // the last sees most
    if (visible <= 0) {
      for (int i = 0; i < count; ++i) states[i * size + dim] = -kInfinity;
      return;
    }
    const int panels = panels_of(visible), width = panels * kPanel;
    const Number* lines = queries_ + (std::size_t(row_begin) * group + line) * dim;
    float* scores = space_.scores.data();
    Number* weights = space_.weights.data();
    product(count, lines, dim, space_.keys.data(), panel_size(dim), panels, dim, nullptr,
            [&](int row, int panel, Floats left, Floats right) {
              float* to = scores + row * kStretch + panel * kPanel;
              store(to, score(left));
              store(to + kLanes, score(right));
            });
    for (int i = 0; i < count; ++i) {
      const Seen s = seen(row_begin + (line + i) / group);
      const Weighed w = weigh(scores + i * kStretch, s.begin - begin, std::min(s.end, end) - begin, width,
                              weights + i * kStretch);
      states[i * size + dim] = w.best;
      states[i * size + dim + 1] = w.mass;
    }
    product(count, weights, kStretch, space_.values.data(), panel_size(kStretch), panels_of(dim), width, nullptr,
            [&](int row, int panel, Floats left, Floats right) {
              float* to = states + row * size + panel * kPanel;
              store(to, left);
              store(to + kLanes, right);
            });
  }

  // Returns scores as exponents of 2.
  Floats score(Floats x) const {
    if (layer_.score_softcap == 0) return x * all(layer_.score_scale * kLog2E);
    const float cap = layer_.score_softcap;
    return tanh(x * all(layer_.score_scale / cap)) * all(cap * kLog2E);
  }

  // Packs keys as columns and values as rows, and fills the last panel with zeros.
  void pack(int table, int begin, int end) {
    const int dim = model_.head_dim, columns = panels_of(end - begin) * kPanel;
    const std::size_t* offsets = locate(table, begin, end);
    const auto row = [&](const Number* pool, int key) { return begin + key < end ? pool + offsets[key] : nullptr; };
    for (int key = 0; key < columns; key += kLanes) {
      for (int next = key + kLanes; next < std::min(key + 2 * kLanes, end - begin); ++next)
        for (int at = 0; at < dim; at += 64 / sizeof(Number)) {  // fetch the next keys while these are packed
          _mm_prefetch((const char*)(keys_ + offsets[next] + at), _MM_HINT_T0);
          _mm_prefetch((const char*)(values_ + offsets[next] + at), _MM_HINT_T0);
        }
      pack_columns(space_.keys.data() + key / kPanel * panel_size(dim) + key % kPanel * kDeep<Number>,
                   dim, [&](int i) { return row(keys_, key + i); });
      for (int first = key; first < key + kLanes; first += kDeep<Number>)
        pack_values(first, [&](int i) { return row(values_, first + i); });
    }
  }

  // Packs the values of one slice of keys. row(i) returns a pointer, or null for zeros.
  template <class Row>
  void pack_values(int key, Row row) {
    for (int at = 0; at < model_.head_dim; at += kPanel) {
      const Number* rows[kDeep<Number>];
      for (int i = 0; i < kDeep<Number>; ++i) {
        const Number* from = row(i);
        rows[i] = from ? from + at : kZeros<Number>;
      }
      pack_slice(space_.values.data() + at / kPanel * panel_size(kStretch) + std::size_t(key) * kPanel, rows);
    }
  }

  // Returns the offsets of the rows of keys [begin, end) in the pools.
  const std::size_t* locate(int table, int begin, int end) {
    const int size = model_.block_size;
    const std::size_t stride = std::size_t(model_.kv_heads) * model_.head_dim;
    std::size_t* offsets = space_.offsets.data();
    for (int key = begin; key < end;) {
      const std::size_t slot = std::size_t(batch_.tables[table + key / size]) * size + key % size;
      std::size_t offset = slot * stride + std::size_t(task_.kv_head) * model_.head_dim;
      for (const int stop = std::min(end, (key / size + 1) * size); key < stop; ++key, offset += stride)
        offsets[key - begin] = offset;
    }
    return offsets;
  }

  const Model& model_;
  const Layer& layer_;
  const Batch& batch_;
  const Task& task_;
  Workspace& space_;
  const Number *keys_, *values_;  // the layer's pools
  const Number* queries_;         // of the task's key head
};

template <class Number>
void Attention<Number>::prepare(const Model& model, const Batch& batch, int num_threads) {
  trunk_tasks_.clear();
  row_tasks_.clear();
  trunk_states_.clear();
  for (int i = 0; i < batch.num_spans; ++i) cut(model, batch.spans[i], num_threads);
  workspaces_.resize(num_threads);
  const std::size_t states = std::size_t(std::max(kMaxLines, group_size(model))) * state_size(model);
  for (auto& space : workspaces_) {
    space.keys.resize(kStretch * model.head_dim);
    space.values.resize(kStretch * model.head_dim);
    space.offsets.resize(kStretch);
    space.scores.resize(kMaxRows * kStretch);
    space.weights.resize(kMaxRows * kStretch);
    space.fresh.resize(states);
    space.total.resize(states);
  }
}

// Cuts the rows of a span into tiles. If these are too few to keep all threads busy, as in a group that is being
// written, the stretches of its trunk are tasks of their own; their states are merged afterwards, in the same order.
template <class Number>
void Attention<Number>::cut(const Model& model, const Span& span, int num_threads) {
  const int rows = span.row_end - span.row_begin, enough = 4 * num_threads;
  const auto tiles = [&](std::vector<Task>& tasks, int height, int stretch, std::size_t states) {
    for (int row = span.row_begin; row < span.row_end; row += height)
      for (int head = 0; head < model.kv_heads; ++head)
        tasks.push_back({&span, row, std::min(row + height, span.row_end), head, stretch, states});
  };
  const int height = std::max(1, kMaxLines / group_size(model));
  const std::size_t floats =
      std::size_t(stretches_of(span.trunk_keys)) * rows * model.heads * state_size(model);
  const bool few = (rows + height - 1) / height * model.kv_heads < enough;
  std::size_t states = kOwn;
  if (span.trunk_keys && few && floats * sizeof(float) <= kMaxSharedBytes) {
    states = trunk_states_.size();
    trunk_states_.resize(states + floats);
    for (int stretch = 0; stretch < stretches_of(span.trunk_keys); ++stretch)
      tiles(trunk_tasks_, height, stretch, states);
  }
  const int least = (rows * model.kv_heads + enough - 1) / enough;
  tiles(row_tasks_, few ? std::clamp(least, 1, height) : height, 0, states);
}

// Returns the place of the state of a row's first line over one stretch of the trunk. Those of the next rows follow.
template <class Number>
float* Attention<Number>::shared_state(const Model& model, const Task& task, int stretch, int row) {
  const Span& span = *task.span;
  const int rows = span.row_end - span.row_begin;
  const std::size_t place = (std::size_t(task.kv_head) * stretches_of(span.trunk_keys) + stretch) * rows;
  return trunk_states_.data() + task.states +
         (place + row - span.row_begin) * group_size(model) * state_size(model);
}

template <class Number>
void Attention<Number>::run(const Model& model, const Layer& layer, const Batch& batch, const Number* queries,
                            Number* output, Team& team) {
  team.share(int(trunk_tasks_.size()), [&](int i, int thread) {
    const Task& task = trunk_tasks_[i];
    Reader<Number>(model, layer, batch, queries, task, workspaces_[thread])
        .trunk(task.stretch, shared_state(model, task, task.stretch, task.row_begin));
  });
  team.share(int(row_tasks_.size()), [&](int i, int thread) {
    finish(model, layer, batch, queries, row_tasks_[i], workspaces_[thread], output);
  });
}

// Reads all keys that the rows of a task see, and writes the rows' output.
template <class Number>
void Attention<Number>::finish(const Model& model, const Layer& layer, const Batch& batch, const Number* queries,
                               const Task& task, Workspace& space, Number* output) {
  const int group = group_size(model), dim = model.head_dim, size = state_size(model);
  const int rows = task.row_end - task.row_begin;
  const Span& span = *task.span;
  Reader<Number> reader(model, layer, batch, queries, task, space);
  float* total = space.total.data();
  for (int line = 0; line < rows * group; ++line) total[line * size + dim] = -kInfinity;
  for (int stretch = 0; stretch < stretches_of(span.trunk_keys); ++stretch) {
    const float* fresh = space.fresh.data();
    if (task.states == kOwn)
      reader.trunk(stretch, space.fresh.data());
    else
      fresh = shared_state(model, task, stretch, task.row_begin);
    reader.merge_all(fresh, total, rows);
  }
  for (int p = span.piece_begin; p < span.piece_end; ++p) {
    const Piece& piece = batch.pieces[p];
    const int begin = std::max(piece.row_begin, task.row_begin), end = std::min(piece.row_end, task.row_end);
    if (begin < end) reader.piece(piece, begin, end, total + (begin - task.row_begin) * group * size);
  }
  for (int line = 0; line < rows * group; ++line) {
    const std::size_t row = task.row_begin + line / group, head = task.kv_head * group + line % group;
    const float* state = total + line * size;
    const Floats mass = all(state[dim + 1]);  // 0 only if no score was a number: the row becomes NaN
    for (int at = 0; at < dim; at += kLanes)
      store(output + (row * model.heads + head) * dim + at, load(state + at) / mass);
  }
}

template class Attention<bf16>;
template class Attention<float>;

}  // namespace motet
