#include "forward.h"

#include <algorithm>
#include <vector>

#include "activations.h"
#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "gemm.h"
#include "logit_rows.h"
#include "norms.h"
#include "rows.h"
#include "strips.h"
#include "thread_pool.h"

namespace motet {
namespace {

constexpr float kKeyLimit = 1e20f;       // keys up to this give finite scores for all queries of a working model
constexpr float kValueLimit = 3.38e38f;  // slightly less than the greatest bf16

// Unpacks a column of packed weights and multiplies it with `scale`. Writes [depth] floats.
template <class Weight>
void unpack_column(const Weight* panels, int column, int depth, float scale, float* to) {
  const Weight* from = panels + column / kPanel * panel_size(depth) + place_of<Weight>(column % kPanel);
  for (int at = 0; at < depth; at += kDeep<Weight>, from += kSlice<Weight>)
    for (int i = 0; i < kDeep<Weight>; ++i) to[at + i] = to_float(from[i]) * scale;
}

template <class Number>
class ForwardIn final : public Forward {
 public:
  ForwardIn(const Model& model, int num_threads) : model_(model), threads_(num_threads) {}

  void run(const Batch& batch) override;
  void multiply(const Linear& linear, const void* input, int rows, float* output) override;
  ThreadPool& threads() override { return threads_; }

 private:
  void prepare(const Batch& batch);
  void prepare_sums(std::size_t rows);
  void embed(const Batch& batch);
  void project(const Layer& layer, const Batch& batch, bool last);
  void store_row(const Layer& layer, const Batch& batch, int row, bool last);
  const Batch& keep_logit_rows(const Batch& batch);
  void add_outputs(const Layer& layer, const Batch& batch);
  void attend(const Layer& layer, const Batch& batch);
  void gate(const Layer& layer, int rows);
  void add_experts(const Layer& layer, int rows);
  void add(const Linear& linear, const Norm& post_norm, float scale, const Number* input, int rows);
  void head(const Batch& batch);
  void norm(const Norm& norm, int rows);
  template <class Work>
  void each_row(int rows, Work work);
  template <class Done>
  void product_of(const Linear& linear, const Number* input, int rows, Done done);

  const Model& model_;
  ThreadPool threads_;
  Attention<Number> attention_;
  ExpertLayer<Number> experts_;
  LogitRows logit_rows_;
  Adapters<Number> adapters_;
  std::vector<float> residual_;            // [rows][hidden]
  std::vector<float> projected_;           // [rows][columns of qkv, or hidden]
  std::vector<Number> input_;              // [rows][hidden, or heads * head_dim]: input of the next product
  std::vector<Number> gated_;              // [rows][intermediate]
  std::vector<Number> queries_;            // see Attention::run
  std::vector<std::vector<float>> sums_;   // for each thread, scratch for sums of products (see `product`)
};

template <class Number>
void ForwardIn<Number>::run(const Batch& batch) {
  prepare(batch);
  embed(batch);
  const Batch* remaining = &batch;
  for (int i = 0; i < model_.num_layers; ++i) {
    const bool last = i == model_.num_layers - 1;
    project(model_.layers[i], batch, last);
    if (last) remaining = &keep_logit_rows(batch);
    if (remaining->num_rows == 0) return;  // no logits are requested, as for a chunk of a prompt that is not the last
    add_outputs(model_.layers[i], *remaining);
  }
  head(*remaining);
}

template <class Number>
void ForwardIn<Number>::prepare(const Batch& batch) {
  const std::size_t rows = batch.num_rows, max_rows = std::max(batch.num_rows, batch.num_logits);
  const int query_size = model_.heads * model_.head_dim;
  grow(residual_, rows * model_.hidden);
  grow(projected_, rows * std::max(model_.layers[0].qkv.columns, model_.hidden));
  grow(input_, max_rows * std::max(query_size, model_.hidden));
  for (int i = 0; i < model_.num_layers; ++i) grow(gated_, rows * model_.layers[i].down.depth);
  grow(queries_, rows * query_size);
  prepare_sums(max_rows);
  logit_rows_.prepare(batch);
  adapters_.prepare(batch);
  attention_.prepare(model_, batch, threads_.size());
}

template <class Number>
void ForwardIn<Number>::prepare_sums(std::size_t rows) {
  sums_.resize(threads_.size());
  for (auto& sums : sums_) grow(sums, rows * kMaxStrip * kPanel);
}

template <class Number>
void ForwardIn<Number>::embed(const Batch& batch) {
  const int hidden = model_.hidden;
  const Floats scale = all(model_.embedding_scale);
  each_row(batch.num_rows, [&](std::size_t row) {
    float* to = residual_.data() + row * hidden;
    const std::size_t token = batch.tokens[row];
    if (model_.embedding) {
      const Number* from = static_cast<const Number*>(model_.embedding) + token * hidden;
      for (int at = 0; at < hidden; at += kLanes) store(to + at, load(from + at) * scale);
      return;
    }
    const float unit = model_.head.scales ? model_.head.scales[token] : 1.0f;
    with_panels<Number>(model_.head, [&](const auto* panels) {
      unpack_column(panels, token, hidden, unit * model_.embedding_scale, to);
    });
  });
}

template <class Number>
void ForwardIn<Number>::project(const Layer& layer, const Batch& batch, bool last) {
  const int columns = layer.qkv.columns;
  norm(layer.attention_norm, batch.num_rows);
  product_of(layer.qkv, input_.data(), batch.num_rows, [&](int row, int column, Floats left, Floats right) {
    float* to = projected_.data() + std::size_t(row) * columns + column;
    store(to, left);
    store(to + kLanes, right);
  });
  each_row(batch.num_rows, [&](int row) { store_row(layer, batch, row, last); });
}

// Applies norms and RoPE to a row's query and key heads. Writes queries to `queries_`, and keys and values to the KV
// cache. In the last layer, only rows whose logits are requested have queries.
template <class Number>
void ForwardIn<Number>::store_row(const Layer& layer, const Batch& batch, int row, bool last) {
  const int dim = model_.head_dim, heads = model_.heads, kv_heads = model_.kv_heads, group = heads / kv_heads;
  float* x = projected_.data() + std::size_t(row) * layer.qkv.columns;
  const std::size_t position = batch.positions[row], slot = batch.slots[row];
  const auto embed_position = [&](const Norm& norm, float* here, int count) {
    const int half = layer.rotary.dims / 2;
    if (!layer.rotates_first) norm_heads(norm, here, count * dim);
    if (layer.rotary.cosines)
      for (int head = 0; head < count; ++head)
        rotate(layer.rotary, layer.rotary.cosines + position * half, layer.rotary.sines + position * half,
               here + head * dim);
    if (layer.rotates_first) norm_heads(norm, here, count * dim);
  };
  if (!last || logit_rows_.contains(row)) {
    const int rows = last ? logit_rows_.num_rows() : batch.num_rows, query_row = last ? logit_rows_.index_of(row) : row;
    embed_position(layer.query_norm, x, heads);
    for (int head = 0; head < heads; ++head) {
      Number* to = queries_.data() + ((std::size_t(head / group) * rows + query_row) * group + head % group) * dim;
      for (int at = 0; at < dim; at += kLanes) store_first(to + at, load(x + head * dim + at), dim - at);
    }
  }
  float *keys = x + heads * dim, *values = keys + kv_heads * dim;
  embed_position(layer.key_norm, keys, kv_heads);
  const std::size_t place = slot * kv_heads * dim;
  store_finite(static_cast<Number*>(layer.keys) + place, keys, kv_heads * dim, kKeyLimit);
  const bool finite = store_finite(static_cast<Number*>(layer.values) + place, values, kv_heads * dim, kValueLimit);
  if (last) batch.non_finite[row] = !finite;
}

// Removes the rows whose logits are not requested from the residual. Returns the batch of the remaining rows.
template <class Number>
const Batch& ForwardIn<Number>::keep_logit_rows(const Batch& batch) {
  if (logit_rows_.are_all_rows()) return batch;
  const int hidden = model_.hidden;
  for (int row = 0; row < batch.num_rows; ++row)
    if (const int to = logit_rows_.index_of(row); logit_rows_.contains(row) && to < row)
      std::copy_n(residual_.data() + std::size_t(row) * hidden, hidden, residual_.data() + std::size_t(to) * hidden);
  adapters_.keep(logit_rows_);
  attention_.prepare(model_, logit_rows_.batch(), threads_.size());
  return logit_rows_.batch();
}

// Adds the outputs of attention and of the feed-forward part to the residual.
template <class Number>
void ForwardIn<Number>::add_outputs(const Layer& layer, const Batch& batch) {
  if (layer.parallel) gate(layer, batch.num_rows);
  attend(layer, batch);
  if (layer.experts.count) return add_experts(layer, batch.num_rows);
  if (!layer.parallel) gate(layer, batch.num_rows);
  add(layer.down, layer.mlp_post_norm, layer.residual_scale, gated_.data(), batch.num_rows);
}

// Adds the output of attention to the residual.
template <class Number>
void ForwardIn<Number>::attend(const Layer& layer, const Batch& batch) {
  attention_.run(model_, layer, batch, queries_.data(), input_.data(), threads_);
  add(layer.out, layer.attention_post_norm, layer.residual_scale, input_.data(), batch.num_rows);
}

// Writes the input of the down product to `gated_`.
template <class Number>
void ForwardIn<Number>::gate(const Layer& layer, int rows) {
  const int width = layer.down.depth, activation = layer.activation;
  const bool gated = layer.gated;
  norm(layer.mlp_norm, rows);
  product_of(layer.gate_up, input_.data(), rows, [&](int row, int column, Floats left, Floats right) {
    Number* to = gated_.data() + std::size_t(row) * width;
    if (gated) return store(to + column / 2, activate(activation, left) * right);
    store(to + column, activate(activation, left));
    store(to + column + kLanes, activate(activation, right));
  });
}

// Adds a product, or the norm of a product, to the residual, both times `scale`.
template <class Number>
void ForwardIn<Number>::add(const Linear& linear, const Norm& post_norm, float scale, const Number* input, int rows) {
  const int hidden = model_.hidden;
  const bool normed = post_norm.weight;
  float* target = normed ? projected_.data() : residual_.data();
  product_of(linear, input, rows, [&](int row, int column, Floats left, Floats right) {
    float* to = target + std::size_t(row) * hidden + column;
    if (!normed) {
      left = fma(left, all(scale), load(to));
      right = fma(right, all(scale), load(to + kLanes));
    }
    store(to, left);
    store(to + kLanes, right);
  });
  if (!normed) return;
  each_row(rows, [&](std::size_t row) {
    add_norm(post_norm, projected_.data() + row * hidden, scale, residual_.data() + row * hidden);
  });
}

// Adds the results of experts, including the shared expert, to the residual.
template <class Number>
void ForwardIn<Number>::add_experts(const Layer& layer, int rows) {
  const int hidden = model_.hidden;
  const bool shared = layer.down.panels;
  float* total = projected_.data();
  if (shared)
    gate(layer, rows);
  else
    norm(layer.mlp_norm, rows);
  experts_.run(layer, input_.data(), rows, total, threads_);
  if (shared)
    product_of(layer.down, gated_.data(), rows, [&](int row, int column, Floats left, Floats right) {
      float* to = total + std::size_t(row) * hidden + column;
      const Floats factor = all(experts_.shared_factor(layer.experts, row));
      store(to, fma(left, factor, load(to)));
      store(to + kLanes, fma(right, factor, load(to + kLanes)));
    });
  each_row(rows, [&](std::size_t row) {
    const float* from = total + row * hidden;
    float* to = residual_.data() + row * hidden;
    if (layer.mlp_post_norm.weight) return add_norm(layer.mlp_post_norm, from, layer.residual_scale, to);
    const Floats scale = all(layer.residual_scale);
    for (int at = 0; at < hidden; at += kLanes) store(to + at, fma(load(from + at), scale, load(to + at)));
  });
}

template <class Number>
void ForwardIn<Number>::head(const Batch& batch) {
  const int hidden = model_.hidden;
  each_row(batch.num_logits, [&](std::size_t i) {
    apply_norm(model_.final_norm, residual_.data() + std::size_t(batch.logit_rows[i]) * hidden, hidden,
               input_.data() + i * hidden);
  });
  const Floats cap = all(model_.logit_softcap), scale = all(model_.logit_scale);
  product_of(model_.head, input_.data(), batch.num_logits, [&](int row, int column, Floats left, Floats right) {
    left = left * scale;
    right = right * scale;
    if (model_.logit_softcap != 0) {
      left = tanh(left / cap) * cap;
      right = tanh(right / cap) * cap;
    }
    float* to = batch.logits + std::size_t(row) * model_.vocab + column;
    store(to, left, lanes(0, model_.vocab - column));
    store(to + kLanes, right, lanes(0, model_.vocab - column - kLanes));
  });
}

// Writes the norms of the residual's rows to `input_`.
template <class Number>
void ForwardIn<Number>::norm(const Norm& norm, int rows) {
  const int hidden = model_.hidden;
  each_row(rows, [&](std::size_t row) {
    apply_norm(norm, residual_.data() + row * hidden, hidden, input_.data() + row * hidden);
  });
}

template <class Number>
template <class Work>
void ForwardIn<Number>::each_row(int rows, Work work) {
  threads_.parallel_for((rows + kFewRows - 1) / kFewRows, [&](int piece, int) {
    for (int row = piece * kFewRows; row < std::min(rows, (piece + 1) * kFewRows); ++row) work(row);
  });
}

template <class Number>
void ForwardIn<Number>::multiply(const Linear& linear, const void* input, int rows, float* output) {
  prepare_sums(rows);
  product_of(linear, static_cast<const Number*>(input), rows, [&](int row, int column, Floats left, Floats right) {
    float* to = output + std::size_t(row) * linear.columns + column;
    store(to, left);
    store(to + kLanes, right);
  });
}

// Computes a product, and calls done(row, column, left, right) for every 32 columns of a row, with 16 results each.
template <class Number>
template <class Done>
void ForwardIn<Number>::product_of(const Linear& linear, const Number* input, int rows, Done done) {
  const int panels = panels_of(linear.columns), depth = linear.depth;
  const int strip = strip_of(panels, threads_.size());
  const bool has_adapters = adapters_.start(linear, input, rows, threads_);
  with_panels<Number>(linear, [&](const auto* weights) {
    threads_.parallel_for((panels + strip - 1) / strip, [&](int piece, int thread) {
      const int begin = piece * strip, count = std::min(strip, panels - begin);
      if (has_adapters) adapters_.compute(begin, count, thread);
      product(rows, input, depth, weights + begin * panel_size(depth), panel_size(depth), count, depth,
              sums_[thread].data(), [&](int row, int panel, Floats left, Floats right) {
                const int column = (begin + panel) * kPanel;
                left = finished(linear, column, left);
                right = finished(linear, column + kLanes, right);
                if (has_adapters) adapters_.add(row, panel, thread, left, right);
                done(row, column, left, right);
              });
    });
  });
}

}  // namespace

std::unique_ptr<Forward> Forward::of(const Model& model, int num_threads) {
  if (model.numbers == kFloat32) return std::make_unique<ForwardIn<float>>(model, num_threads);
  return std::make_unique<ForwardIn<bf16>>(model, num_threads);
}

}  // namespace motet
