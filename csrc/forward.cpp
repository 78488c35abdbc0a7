#include "forward.h"

#include <algorithm>

#include "gemm.h"
#include "rows.h"

namespace motet {
namespace {

constexpr float kKeyLimit = 1e20f;       // keys up to this give finite scores for all queries of a working model
constexpr float kValueLimit = 3.38e38f;  // nearly the greatest bf16
constexpr int kFewRows = 4;              // this many rows cost less than to involve another thread
constexpr int kMaxStrip = 8;             // most panels that a thread takes at once

template <class Memory>
void grow(Memory& memory, std::size_t size) {
  if (memory.size() < size) memory.resize(size);
}

// Returns how many of a product's panels a thread takes at once. They should be many, but all threads must end at the
// same time, with at least three pieces for each, so that a thread that loses its core delays little.
int strip_of(int panels, int threads) {
  int best = 1, least = panels;
  for (int strip = 1; strip <= std::clamp(panels / (3 * threads), 1, kMaxStrip); ++strip) {
    const int pieces = (panels + strip - 1) / strip, of_one_thread = (pieces + threads - 1) / threads * strip;
    if (of_one_thread > least) continue;
    best = strip;
    least = of_one_thread;
  }
  return best;
}

// Unpacks a column of packed weights, times `scale`.
template <class Weight>
void unpack_column(const Weight* panels, int column, int depth, float scale, float* to) {
  const Weight* from = panels + column / kPanel * panel_size(depth) + place_of<Weight>(column % kPanel);
  for (int at = 0; at < depth; at += 2, from += kPair) {
    to[at] = to_float(from[0]) * scale;
    to[at + 1] = to_float(from[1]) * scale;
  }
}

}  // namespace

void Forward::run(const Batch& batch) {
  prepare(batch);
  embed(batch);
  for (int i = 0; i < model_.num_layers; ++i) {
    attend(model_.layers[i], batch);
    feed_forward(model_.layers[i], batch);
  }
  head(batch);
}

void Forward::prepare(const Batch& batch) {
  const std::size_t rows = batch.num_rows, most = std::max(batch.num_rows, batch.num_logits);
  const int query_size = model_.heads * model_.head_dim;
  grow(residual_, rows * model_.hidden);
  grow(projected_, rows * std::max(model_.layers[0].qkv.columns, model_.hidden));
  grow(input_, most * std::max(query_size, model_.hidden));
  grow(gated_, rows * model_.intermediate);
  grow(queries_, rows * query_size);
  prepare_sums(most);
  attention_.prepare(model_, batch, team_.size());
}

void Forward::prepare_sums(std::size_t rows) {
  sums_.resize(team_.size());
  for (auto& sums : sums_) grow(sums, rows * kMaxStrip * kPanel);
}

void Forward::embed(const Batch& batch) {
  const int hidden = model_.hidden;
  const Floats scale = all(model_.embedding_scale);
  each_row(batch.num_rows, [&](std::size_t row) {
    float* to = residual_.data() + row * hidden;
    const std::size_t token = batch.tokens[row];
    if (model_.embedding) {
      const bf16* from = model_.embedding + token * hidden;
      for (int at = 0; at < hidden; at += kLanes) store(to + at, load_bf16(from + at) * scale);
      return;
    }
    if (const float* scales = model_.head.scales)
      unpack_column(static_cast<const std::int8_t*>(model_.head.panels), token, hidden,
                    scales[token] * model_.embedding_scale, to);
    else
      unpack_column(static_cast<const bf16*>(model_.head.panels), token, hidden, model_.embedding_scale, to);
  });
}

void Forward::attend(const Layer& layer, const Batch& batch) {
  const int columns = layer.qkv.columns;
  norm(layer.attention_norm, batch.num_rows);
  multiply(layer.qkv, input_.data(), batch.num_rows, [&](int row, int column, Floats left, Floats right) {
    float* to = projected_.data() + std::size_t(row) * columns + column;
    store(to, left);
    store(to + kLanes, right);
  });
  const bool last = &layer == model_.layers + model_.num_layers - 1;
  each_row(batch.num_rows, [&](int row) { place(layer, batch, row, last); });
  attention_.run(model_, layer, batch, queries_.data(), input_.data(), team_);
  add(layer.out, layer.attention_post_norm, input_.data(), batch.num_rows);
}

// Turns a row's query and key heads by its position. Writes queries to `queries_`, keys and values to the cache.
void Forward::place(const Layer& layer, const Batch& batch, int row, bool last) {
  const int dim = model_.head_dim, heads = model_.heads, kv_heads = model_.kv_heads, group = heads / kv_heads;
  float* x = projected_.data() + std::size_t(row) * layer.qkv.columns;
  const std::size_t position = batch.positions[row], slot = batch.slots[row];
  const float *cosines = layer.cosines + position * (dim / 2), *sines = layer.sines + position * (dim / 2);
  for (int head = 0; head < heads + kv_heads; ++head) {
    float* here = x + head * dim;
    const bool query = head < heads;
    if (const float* weights = query ? layer.query_norm : layer.key_norm) rms_norm(here, weights, dim, model_.epsilon);
    turn(here, cosines, sines, dim);
    if (query) {
      bf16* to = queries_.data() + ((std::size_t(head / group) * batch.num_rows + row) * group + head % group) * dim;
      for (int at = 0; at < dim; at += kLanes) store_bf16(to + at, load(here + at));
    } else {
      store_sound(layer.keys + (slot * kv_heads + head - heads) * dim, here, dim, kKeyLimit);
    }
  }
  const float* values = x + (heads + kv_heads) * dim;
  const bool sound = store_sound(layer.values + slot * kv_heads * dim, values, kv_heads * dim, kValueLimit);
  if (last) batch.sick[row] = !sound;
}

void Forward::feed_forward(const Layer& layer, const Batch& batch) {
  const int width = model_.intermediate;
  const bool gelu = model_.activation == kGeluTanh;
  norm(layer.mlp_norm, batch.num_rows);
  multiply(layer.gate_up, input_.data(), batch.num_rows, [&](int row, int column, Floats gate, Floats up) {
    store_bf16(gated_.data() + std::size_t(row) * width + column / 2,
               (gelu ? gelu_tanh(gate) : silu(gate)) * up);
  });
  add(layer.down, layer.mlp_post_norm, gated_.data(), batch.num_rows);
}

// Adds a product, or its norm, to the residual.
void Forward::add(const Linear& linear, const float* post_norm, const bf16* input, int rows) {
  const int hidden = model_.hidden;
  float* target = post_norm ? projected_.data() : residual_.data();
  multiply(linear, input, rows, [&](int row, int column, Floats left, Floats right) {
    float* to = target + std::size_t(row) * hidden + column;
    if (!post_norm) {
      left = left + load(to);
      right = right + load(to + kLanes);
    }
    store(to, left);
    store(to + kLanes, right);
  });
  if (!post_norm) return;
  each_row(rows, [&](std::size_t row) {
    rms_norm(projected_.data() + row * hidden, post_norm, hidden, model_.epsilon, residual_.data() + row * hidden);
  });
}

void Forward::head(const Batch& batch) {
  if (batch.num_logits == 0) return;  // a chunk of a prompt that is not the last
  const int hidden = model_.hidden;
  each_row(batch.num_logits, [&](std::size_t i) {
    rms_norm(residual_.data() + std::size_t(batch.logit_rows[i]) * hidden, model_.final_norm, hidden, model_.epsilon,
             input_.data() + i * hidden);
  });
  const Floats cap = all(model_.logit_softcap);
  multiply(model_.head, input_.data(), batch.num_logits, [&](int row, int column, Floats left, Floats right) {
    if (model_.logit_softcap != 0) {
      left = tanh(left / cap) * cap;
      right = tanh(right / cap) * cap;
    }
    float* to = batch.logits + std::size_t(row) * model_.vocab + column;
    store(to, left, lanes(0, model_.vocab - column));
    store(to + kLanes, right, lanes(0, model_.vocab - column - kLanes));
  });
}

// Norms the residual's rows, as the input of a product.
void Forward::norm(const float* weights, int rows) {
  const int hidden = model_.hidden;
  each_row(rows, [&](std::size_t row) {
    rms_norm(residual_.data() + row * hidden, weights, hidden, model_.epsilon, input_.data() + row * hidden);
  });
}

template <class Work>
void Forward::each_row(int rows, Work work) {
  team_.share((rows + kFewRows - 1) / kFewRows, [&](int piece, int) {
    for (int row = piece * kFewRows; row < std::min(rows, (piece + 1) * kFewRows); ++row) work(row);
  });
}

void Forward::multiply(const Linear& linear, const bf16* input, int rows, float* output) {
  prepare_sums(rows);
  multiply(linear, input, rows, [&](int row, int column, Floats left, Floats right) {
    float* to = output + std::size_t(row) * linear.columns + column;
    store(to, left);
    store(to + kLanes, right);
  });
}

// Computes a product, and calls done(row, column, 16 results, the next 16) for every 32 columns of a row.
template <class Done>
void Forward::multiply(const Linear& linear, const bf16* input, int rows, Done done) {
  const int panels = panels_of(linear.columns), depth = linear.depth;
  const int strip = strip_of(panels, team_.size());
  const auto scaled = [&](Floats sum, int column) {
    const Floats bias = linear.bias ? load(linear.bias + column) : all(0.0f);
    if (linear.scales) {
      return fma(sum, load(linear.scales + column) * all(kInt8Unit), bias);
    }
    return linear.bias ? sum + bias : sum;
  };
  const auto share = [&](const auto* weights) {
    team_.share((panels + strip - 1) / strip, [&](int piece, int thread) {
      const int begin = piece * strip, count = std::min(strip, panels - begin);
      product(rows, input, depth, weights + begin * panel_size(depth), panel_size(depth), count, depth,
              sums_[thread].data(), [&](int row, int panel, Floats left, Floats right) {
                const int column = (begin + panel) * kPanel;
                done(row, column, scaled(left, column), scaled(right, column + kLanes));
              });
    });
  };
  if (linear.scales)
    share(static_cast<const std::int8_t*>(linear.panels));
  else
    share(static_cast<const bf16*>(linear.panels));
}

}  // namespace motet
