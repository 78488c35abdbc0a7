#include "attention.h"

#include <algorithm>

#include "gemm.h"
#include "pack.h"

namespace motet {
namespace {

constexpr int kAhead = 64;  // keys are prefetched at least this many keys before they are packed

struct BestAndMass {
  float best, mass;
};

// Writes weights 2^(score - best) for scores [begin, end), and zeros elsewhere in [0, width). Returns the best score
// and the sum of the weights.
template <class Number>
BestAndMass softmax_weights(const float* scores, int begin, int end, int width, Number* weights) {
  const auto visible = [&](int at) {
    return begin <= at && at + kLanes <= end ? lanes(0, kLanes) : lanes(begin - at, end - at);
  };
  Floats best = all(-kInfinity);
  for (int at = 0; at < width; at += kLanes) best = choose(visible(at), max(load(scores + at), best), best);
  const float top = reduce_max(best);
  Floats mass = all(0.0f);
  for (int at = 0; at < width; at += kLanes) {
    const Floats weight = choose(visible(at), exp2_of_negative(load(scores + at) - all(top)), all(0.0f));
    mass = mass + weight;
    store(weights + at, weight);
  }
  return {top, sum(mass)};
}

float exp2_of_difference(float x, float y) { return first(exp2_of_negative(all(x - y))); }

// Merges a line's state over one stretch, `fresh`, into its state over the previous stretches, `total`.
void merge(float* total, const float* fresh, int width) {
  float &best = total[width], &mass = total[width + 1];
  const float fresh_best = fresh[width], fresh_mass = fresh[width + 1];
  if (fresh_best == -kInfinity) return;  // no visible key
  if (best == -kInfinity) {
    std::copy(fresh, fresh + width + 2, total);
    return;
  }
  const float top = std::max(best, fresh_best);
  const float old_weight = exp2_of_difference(best, top), new_weight = exp2_of_difference(fresh_best, top);
  for (int at = 0; at < width; at += kLanes) {
    const Floats fresh_sum = load(fresh + at) * all(new_weight);
    store(total + at, fma(load(total + at), all(old_weight), fresh_sum));
  }
  mass = mass * old_weight + fresh_mass * new_weight;
  best = top;
}

// Adds a key without a value to a state. `score` is its exponent of 2.
void add_sink(float* state, float score, int width) {
  float &best = state[width], &mass = state[width + 1];
  const float top = std::max(best, score), weight = exp2_of_difference(best, top);
  for (int at = 0; at < width; at += kLanes) store(state + at, load(state + at) * all(weight));
  mass = mass * weight + exp2_of_difference(score, top);
  best = top;
}

// Keys [begin, end) of a table that a row sees.
struct VisibleKeys {
  int begin, end;
};

}  // namespace

// Computes attention over stretches for one key head.
template <class Number>
class Reader {
 public:
  using Workspace = typename Attention<Number>::Workspace;

  Reader(const Model& model, const Layer& layer, const Batch& batch, const Number* queries, int kv_head,
         Workspace& space, float* trunk_states)
      : model_(model),
        layer_(layer),
        batch_(batch),
        kv_head_(kv_head),
        space_(space),
        trunk_states_(trunk_states),
        keys_(static_cast<const Number*>(layer.keys)),
        values_(static_cast<const Number*>(layer.values)),
        queries_(queries + std::size_t(kv_head) * batch.num_rows * group_size(model) * model.head_dim) {}

  // Reads one stretch of trunks for consecutive parts of a reading. Equal keys are read once. `next` are the keys that
  // the thread will probably read afterwards.
  void parts(const Part* begin, const Part* end, int stretch, const Keys& next) {
    int packed = 0;  // number of packed keys that the next part has in common
    const auto equal = [](const Part& part, const Part& before) {
      return part.common == part.keys && part.common == before.keys;
    };
    for (const Part *first = begin, *last; first < end; first = last) {
      for (last = first + 1; last < end && equal(last[0], last[-1]);) ++last;
      const bool alone = last - first == 1;
      const int rows = alone ? first->row_end - first->row_begin : gather(first, last);
      const Number* queries = alone ? lines_of(first->row_begin) : space_.queries.data();
      const auto visible = [&](int i) {
        return VisibleKeys{in_window(alone ? first->row_begin + i : space_.rows[i]), stretch * kStretch + first->keys};
      };
      packed = read(first->span->trunk_table, stretch, std::min(packed, first->common), rows, queries, visible,
                    alone ? states_of(*first, stretch) : space_.fresh.data(), last == end ? next : Keys{});
      if (!alone) scatter(first, last, stretch);
    }
  }

  // Returns the location of the states of a part's rows over one stretch. The states of a trunk that is in no reading
  // are needed only until the next stretch.
  float* states_of(const Part& part, int stretch) {
    if (part.states == kNotShared) return space_.fresh.data();
    const Span& span = *part.span;
    const int rows = span.row_end - span.row_begin;
    const std::size_t place = (std::size_t(kv_head_) * stretches_of(span.trunk_keys) + stretch) * rows;
    return trunk_states_ + part.states + (place + part.row_begin - span.row_begin) * group_size(model_) *
                                             state_size(model_);
  }

  // Reads all keys of a piece's table that its rows [begin, end) see, and merges the states into `total`.
  void piece(const Piece& piece, int begin, int end, float* total) {
    const int window = layer_.window;
    const auto visible = [&](int i) {
      const int last = piece.first + begin + i - piece.row_begin + 1;
      return VisibleKeys{window ? std::max(0, last - window) : 0, last};
    };
    const int keys = visible(end - begin - 1).end;
    for (int stretch = visible(0).begin / kStretch; stretch < stretches_of(keys); ++stretch) {
      read(piece.table, stretch, 0, end - begin, lines_of(begin), visible, space_.fresh.data(),
           keys_in(piece.table, stretch + 1, keys, kv_head_));
      merge_all(space_.fresh.data(), total, end - begin);
    }
  }

  void merge_all(const float* fresh, float* total, int rows) {
    const int size = state_size(model_);
    for (int line = 0; line < rows * group_size(model_); ++line)
      merge(total + line * size, fresh + line * size, padded_dim(model_));
  }

 private:
  const Number* lines_of(int row) const { return queries_ + std::size_t(row) * group_size(model_) * model_.head_dim; }

  // Returns the first key of its trunk that a row sees.
  int in_window(int row) const {
    return layer_.window ? std::max(0, batch_.positions[row] + 1 - layer_.window) : 0;
  }

  // Copies the queries of parts into contiguous memory. Returns the number of their rows.
  int gather(const Part* first, const Part* last) {
    const std::size_t size = std::size_t(group_size(model_)) * model_.head_dim;
    int rows = 0;
    for (const Part* part = first; part < last; ++part)
      for (int row = part->row_begin; row < part->row_end; ++row, ++rows) {
        space_.rows[rows] = row;
        std::copy_n(lines_of(row), size, space_.queries.data() + rows * size);
      }
    return rows;
  }

  // Copies the states of parts from contiguous memory to the states of their trunks.
  void scatter(const Part* first, const Part* last, int stretch) {
    const float* from = space_.fresh.data();
    for (const Part* part = first; part < last; ++part) {
      const std::size_t count = std::size_t(part->row_end - part->row_begin) * group_size(model_) * state_size(model_);
      std::copy_n(from, count, states_of(*part, stretch));
      from += count;
    }
  }

  // Writes the states of rows over one stretch of a table. The first `packed` keys of the stretch are packed already.
  // Returns the number of packed keys afterwards.
  template <class Visible>
  int read(int table, int stretch, int packed, int rows, const Number* queries, Visible visible, float* states,
           const Keys& next) {
    const int lines = rows * group_size(model_), size = state_size(model_), begin = stretch * kStretch;
    int end = begin;
    for (int row = 0; row < rows; ++row)
      if (const VisibleKeys s = visible(row); s.begin < begin + kStretch)
        end = std::max(end, std::min(s.end, begin + kStretch));
    if (end > begin) {
      plan_prefetch({table, begin, end, kv_head_}, packed, next);
      pack(begin, end, packed);
    }
    const int height = even_tile(lines, kMaxRows);
    for (int line = 0; line < lines; line += height)
      read_lines(queries, line, std::min(height, lines - line), begin, end, visible, states + line * size);
    if (end == begin) return packed;
    space_.fetched = fetched_ - (end - begin);
    return end - begin;
  }

  // Computes the states over the packed keys [begin, end) for lines [line, line + count) of `queries`, at most
  // kMaxRows.
  template <class Visible>
  void read_lines(const Number* queries, int line, int count, int begin, int end, Visible visible, float* states) {
    const int group = group_size(model_), dim = model_.head_dim, padded = padded_dim(model_);
    const int size = state_size(model_);
    // The last line sees the most keys.
    const int num_visible = std::min(end, visible((line + count - 1) / group).end) - begin;
    if (num_visible <= 0) {
      for (int i = 0; i < count; ++i) states[i * size + padded] = -kInfinity;
      return;
    }
    const int panels = panels_of(num_visible), width = panels * kPanel;
    float* scores = space_.scores.data();
    Number* weights = space_.weights.data();
    const auto fetch = [&] { prefetch_next(); };
    product_in_cache(count, queries + std::size_t(line) * dim, dim, space_.keys.data(), panel_size(padded), panels, dim,
                     fetch, [&](int row, int panel, Floats left, Floats right) {
                       float* to = scores + row * kStretch + panel * kPanel;
                       store(to, score(left));
                       store(to + kLanes, score(right));
                     });
    for (int i = 0; i < count; ++i) {
      const VisibleKeys s = visible((line + i) / group);
      const BestAndMass w = softmax_weights(scores + i * kStretch, s.begin - begin, std::min(s.end, end) - begin,
                                            width, weights + i * kStretch);
      states[i * size + padded] = w.best;
      states[i * size + padded + 1] = w.mass;
    }
    product_in_cache(count, weights, kStretch, space_.values.data(), panel_size(kStretch), panels_of(dim), width, fetch,
                     [&](int row, int panel, Floats left, Floats right) {
                       float* to = states + row * size + panel * kPanel;
                       store(to, left);
                       store(to + kLanes, right);
                     });
  }

  // Scales and caps scores, and returns them as exponents of 2.
  Floats score(Floats x) const {
    if (layer_.score_softcap == 0) return x * all(layer_.score_scale * kLog2E);
    const float cap = layer_.score_softcap;
    return tanh(x * all(layer_.score_scale / cap)) * all(cap * kLog2E);
  }

  // Locates the keys of this stretch, whose first `packed` keys are packed already, and the keys that are
  // probably read next.
  void plan_prefetch(const Keys& keys, int packed, const Keys& next) {
    std::size_t* offsets = space_.offsets.data();
    locate(keys, offsets);
    locate(next, offsets + keys.count());
    fetched_ = std::max(packed, space_.next == keys_ + offsets[0] ? std::min(space_.fetched, keys.count()) : 0);
    to_fetch_ = keys.count() + next.count();
    line_ = 0;
    space_.next = next.count() ? keys_ + offsets[keys.count()] : nullptr;
  }

  // Prefetches the next cache line of keys, and of values, that is not in the L2 cache yet.
  void prefetch_next() {
    if (fetched_ >= to_fetch_) return;
    const std::size_t at = space_.offsets[fetched_] + line_;
    _mm_prefetch((const char*)(keys_ + at), _MM_HINT_T1);
    _mm_prefetch((const char*)(values_ + at), _MM_HINT_T1);
    line_ += 64 / sizeof(Number);
    if (line_ < model_.head_dim) return;
    line_ = 0;
    ++fetched_;
  }

  // Packs keys as columns and values as rows, and fills the last panel with zeros. The first `packed` keys are packed
  // already. Not inlined, because its loops would run out of registers.
  __attribute__((noinline)) void pack(int begin, int end, int packed) {
    const int dim = model_.head_dim, padded = padded_dim(model_), columns = panels_of(end - begin) * kPanel;
    const std::size_t* offsets = space_.offsets.data();
    const auto row = [&](const Number* pool, int key) { return begin + key < end ? pool + offsets[key] : nullptr; };
    const int first = packed / kLanes * kLanes;
    for (int key = first; key < columns; key += kLanes) {
      for (const int stop = std::min(key + kAhead + kLanes, to_fetch_); fetched_ < stop;) prefetch_next();
      pack_columns(space_.keys.data() + key / kPanel * panel_size(padded) + key % kPanel * kDeep<Number>,
                   dim, [&](int i) { return row(keys_, key + i); });
      for (int slice = key; slice < key + kLanes; slice += kDeep<Number>)
        pack_values(slice, [&](int i) { return row(values_, slice + i); });
    }
  }

  // Packs the values of one slice of keys. row(i) returns a pointer to the values of key i, or null for zeros.
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

  // Writes the offsets of keys in the pools, which are also the offsets of their values.
  void locate(const Keys& keys, std::size_t* offsets) {
    const int size = model_.block_size;
    const std::size_t stride = std::size_t(model_.kv_heads) * model_.head_dim;
    for (int key = keys.begin; key < keys.end;) {
      const std::size_t slot = std::size_t(batch_.tables[keys.table + key / size]) * size + key % size;
      std::size_t offset = slot * stride + std::size_t(keys.kv_head) * model_.head_dim;
      for (const int stop = std::min(keys.end, (key / size + 1) * size); key < stop; ++key, offset += stride)
        *offsets++ = offset;
    }
  }

  const Model& model_;
  const Layer& layer_;
  const Batch& batch_;
  const int kv_head_;
  Workspace& space_;
  float* const trunk_states_;  // of all spans
  const Number *keys_, *values_;  // the layer's pools
  const Number* queries_;         // of the key head
  int fetched_ = 0, to_fetch_ = 0;  // number of keys in `space_.offsets` that are in the L2 cache, and that should be
  int line_ = 0;                    // offset in the next key of the cache line that is fetched next
};

template <class Number>
void Attention<Number>::prepare(const Model& model, const Batch& batch, int num_threads) {
  trunks_.prepare(model, batch, num_threads);
  *batch.trunk_keys_read = trunks_.keys_read();
  if (trunk_states_.size() < trunks_.num_states()) trunk_states_.resize(trunks_.num_states());
  row_tasks_.clear();
  for (int i = 0; i < batch.num_spans; ++i) cut(model, batch.spans[i], trunks_.states(i), num_threads);
  workspaces_.resize(num_threads);
  const std::size_t lines = std::max(kMaxLines, group_size(model));
  for (auto& space : workspaces_) {
    space.keys.resize(kStretch * padded_dim(model));
    space.values.resize(kStretch * padded_dim(model));
    space.offsets.resize(2 * kStretch);
    space.scores.resize(kMaxRows * kStretch);
    space.weights.resize(kMaxRows * kStretch);
    space.fresh.resize(lines * state_size(model));
    space.total.resize(lines * state_size(model));
    space.queries.resize(lines * model.head_dim);
    space.rows.resize(lines);
  }
}

// Cuts the rows of a span into tasks. The tasks are smaller if there would be too few to keep all threads busy.
template <class Number>
void Attention<Number>::cut(const Model& model, const Span& span, std::size_t states, int num_threads) {
  const int rows = span.row_end - span.row_begin, max_rows = max_rows_of(model), enough = busy_tasks(num_threads);
  const int busy_rows = (rows * model.kv_heads + enough - 1) / enough;
  const int height = has_few_tasks(model, rows, num_threads) ? std::clamp(busy_rows, 1, max_rows) : max_rows;
  for (int row = span.row_begin; row < span.row_end; row += height)
    for (int head = 0; head < model.kv_heads; ++head)
      row_tasks_.push_back({&span, row, std::min(row + height, span.row_end), head, states});
}

template <class Number>
void Attention<Number>::run(const Model& model, const Layer& layer, const Batch& batch, const Number* queries,
                            Number* output, ThreadPool& threads) {
  const int heads = model.kv_heads, count = int(trunks_.readings().size()) * heads;
  const Part* parts = trunks_.parts().data();
  const auto keys_of = [&](int i) {
    const Reading& reading = trunks_.readings()[i / heads];
    const Part& first = parts[reading.part_begin];
    return keys_in(first.span->trunk_table, reading.stretch, reading.stretch * kStretch + first.keys, i % heads);
  };
  threads.parallel_for(count, [&](int i, int thread) {
    const Reading& reading = trunks_.readings()[i / heads];
    const int next = i + threads.size();  // the other threads will run the iterations between
    Reader<Number>(model, layer, batch, queries, i % heads, workspaces_[thread], trunk_states_.data())
        .parts(parts + reading.part_begin, parts + reading.part_end, reading.stretch,
               next < count ? keys_of(next) : Keys{});
  });
  threads.parallel_for(int(row_tasks_.size()), [&](int i, int thread) {
    finish(model, layer, batch, queries, row_tasks_[i], workspaces_[thread], output);
  });
}

// Reads all keys that the rows of a task see and that are in no reading, merges all states, and writes the rows'
// output.
template <class Number>
void Attention<Number>::finish(const Model& model, const Layer& layer, const Batch& batch, const Number* queries,
                               const Task& task, Workspace& space, Number* output) {
  const int group = group_size(model), dim = model.head_dim, padded = padded_dim(model), size = state_size(model);
  const int rows = task.row_end - task.row_begin;
  const Span& span = *task.span;
  Reader<Number> reader(model, layer, batch, queries, task.kv_head, space, trunk_states_.data());
  float* total = space.total.data();
  for (int line = 0; line < rows * group; ++line) total[line * size + padded] = -kInfinity;
  for (int stretch = 0; stretch < stretches_of(span.trunk_keys); ++stretch) {
    const int keys = std::min(span.trunk_keys - stretch * kStretch, kStretch);
    const Part part{&span, task.row_begin, task.row_end, keys, 0, task.states};
    if (task.states == kNotShared)
      reader.parts(&part, &part + 1, stretch, keys_in(span.trunk_table, stretch + 1, span.trunk_keys, task.kv_head));
    reader.merge_all(reader.states_of(part, stretch), total, rows);
  }
  for (int p = span.piece_begin; p < span.piece_end; ++p) {
    const Piece& piece = batch.pieces[p];
    const int begin = std::max(piece.row_begin, task.row_begin), end = std::min(piece.row_end, task.row_end);
    if (begin < end) reader.piece(piece, begin, end, total + (begin - task.row_begin) * group * size);
  }
  for (int line = 0; line < rows * group; ++line) {
    const std::size_t row = task.row_begin + line / group, head = task.kv_head * group + line % group;
    float* state = total + line * size;
    if (layer.sinks) add_sink(state, layer.sinks[head] * kLog2E, padded);
    const Floats mass = all(state[padded + 1]);  // 0 only if no score is a number: the output is then NaN
    for (int at = 0; at < dim; at += kLanes)
      store_first(output + (row * model.heads + head) * dim + at, load(state + at) / mass, dim - at);
  }
}

template class Attention<bf16>;
template class Attention<float>;

}  // namespace motet
