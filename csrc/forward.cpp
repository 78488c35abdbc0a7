#include "forward.h"

#include <algorithm>

#include "gemm.h"
#include "rows.h"

namespace motet {
namespace {

constexpr float kKeyLimit = 1e20f;         // a score is then finite for any query a sound model has
constexpr float kValueLimit = 3.38e38f;    // nearly the greatest bf16
constexpr int kOwnRows = 4;                // so few rows every thread norms for itself, and saves a meeting

// The rows a thread takes where every row costs the same.
struct Share {
  int begin, end;
  Share(int rows, int thread, int threads) : begin(rows * thread / threads), end(rows * (thread + 1) / threads) {}
};

}  // namespace

void Forward::run(const Batch& batch) {
  const std::size_t rows = batch.num_rows, threads = team_.size(), hidden = model_.hidden;
  const int query_size = model_.heads * model_.head_dim;
  const auto grow = [](auto& memory, std::size_t size) {
    if (memory.size() < size) memory.resize(size);
  };
  grow(residual_, rows * hidden);
  grow(projected_, rows * std::size_t(std::max(model_.layers[0].qkv.columns, model_.hidden)));
  grow(input_, std::max(rows, std::size_t(batch.num_logits)) * std::max(query_size, model_.hidden));
  grow(gated_, rows * model_.intermediate);
  grow(queries_, rows * query_size);
  own_inputs_.resize(threads);
  sums_.resize(threads);
  for (auto& input : own_inputs_) grow(input, kOwnRows * hidden);
  for (auto& sums : sums_) grow(sums, std::max(rows, std::size_t(batch.num_logits)) * 4 * kPanel);
  attention_.prepare(model_, batch, team_.size());
  team_.run([&](int thread) { pass(batch, thread); });
}

void Forward::pass(const Batch& batch, int thread) {
  embed(batch, thread);
  for (int i = 0; i < model_.num_layers; ++i) {
    attend(model_.layers[i], batch, thread);
    feed_forward(model_.layers[i], batch, thread);
  }
  head(batch, thread);
}

void Forward::embed(const Batch& batch, int thread) {
  const int hidden = model_.hidden;
  const __m512 scale = _mm512_set1_ps(model_.embedding_scale);
  const Share share(batch.num_rows, thread, team_.size());
  for (int row = share.begin; row < share.end; ++row) {
    float* to = residual_.data() + std::size_t(row) * hidden;
    const std::size_t token = batch.tokens[row];
    if (model_.embedding) {
      const bf16* from = model_.embedding + token * hidden;
      for (int at = 0; at < hidden; at += kLanes) _mm512_storeu_ps(to + at, _mm512_mul_ps(load_bf16(from + at), scale));
      continue;
    }
    // The token's column of the head: a pair every 128 bytes.
    const bf16* from = model_.head.panels + token / kPanel * panel_size(hidden) + token % kPanel * 2;
    for (int at = 0; at < hidden; at += kLanes) {
      alignas(32) bf16 values[kLanes];
      for (int i = 0; i < kLanes; i += 2) std::memcpy(values + i, from + std::size_t(at + i) * kPanel, 2 * sizeof(bf16));
      _mm512_storeu_ps(to + at, _mm512_mul_ps(load_bf16(values), scale));
    }
  }
  team_.meet();
}

void Forward::attend(const Layer& layer, const Batch& batch, int thread) {
  const int columns = layer.qkv.columns;
  const bf16* input = normed(layer.attention_norm, batch.num_rows, thread);
  multiply(layer.qkv, input, batch.num_rows, thread, [&](int row, int column, __m512 left, __m512 right) {
    float* to = projected_.data() + std::size_t(row) * columns + column;
    _mm512_storeu_ps(to, left);
    _mm512_storeu_ps(to + kLanes, right);
  });
  team_.meet();
  const Share share(batch.num_rows, thread, team_.size());
  const bool last = &layer == model_.layers + model_.num_layers - 1;
  for (int row = share.begin; row < share.end; ++row) place(layer, batch, row, last);
  team_.meet();
  attention_.run(model_, layer, batch, queries_.data(), input_.data(), team_, thread);
  team_.meet();
  add(layer.out, layer.attention_post_norm, input_.data(), batch, thread);
}

// Turns a row's heads by its position; queries go to be asked, keys and values to the cache.
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
      bf16* to = queries_.data() +
                 ((std::size_t(head / group) * batch.num_rows + row) * group + head % group) * dim;
      for (int at = 0; at < dim; at += kLanes) store_bf16(to + at, _mm512_loadu_ps(here + at));
    } else {
      store_sound(layer.keys + (slot * kv_heads + head - heads) * dim, here, dim, kKeyLimit);
    }
  }
  const float* values = x + (heads + kv_heads) * dim;
  const bool sound = store_sound(layer.values + slot * kv_heads * dim, values, kv_heads * dim, kValueLimit);
  if (last) batch.sick[row] = !sound;
}

void Forward::feed_forward(const Layer& layer, const Batch& batch, int thread) {
  const bf16* input = normed(layer.mlp_norm, batch.num_rows, thread);
  const int width = model_.intermediate;
  const bool gelu = model_.activation == kGeluTanh;
  multiply(layer.gate_up, input, batch.num_rows, thread, [&](int row, int column, __m512 gate, __m512 up) {
    store_bf16(gated_.data() + std::size_t(row) * width + column / 2,
               _mm512_mul_ps(gelu ? gelu_tanh(gate) : silu(gate), up));
  });
  team_.meet();
  add(layer.down, layer.mlp_post_norm, gated_.data(), batch, thread);
}

// Adds a product, or the norm of it, to the residual.
void Forward::add(const Linear& linear, const float* post_norm, const bf16* input, const Batch& batch, int thread) {
  const int hidden = model_.hidden;
  float* target = post_norm ? projected_.data() : residual_.data();
  multiply(linear, input, batch.num_rows, thread, [&](int row, int column, __m512 left, __m512 right) {
    float* to = target + std::size_t(row) * hidden + column;
    if (!post_norm) {
      left = _mm512_add_ps(left, _mm512_loadu_ps(to));
      right = _mm512_add_ps(right, _mm512_loadu_ps(to + kLanes));
    }
    _mm512_storeu_ps(to, left);
    _mm512_storeu_ps(to + kLanes, right);
  });
  team_.meet();
  if (!post_norm) return;
  const Share share(batch.num_rows, thread, team_.size());
  for (std::size_t row = share.begin; row < std::size_t(share.end); ++row)
    rms_norm(projected_.data() + row * hidden, post_norm, hidden, model_.epsilon, residual_.data() + row * hidden);
  team_.meet();
}

void Forward::head(const Batch& batch, int thread) {
  if (batch.num_logits == 0) return;  // a piece of a prompt that is not its end
  const int hidden = model_.hidden;
  const Share share(batch.num_logits, thread, team_.size());
  for (int i = share.begin; i < share.end; ++i)
    rms_norm(residual_.data() + std::size_t(batch.logit_rows[i]) * hidden, model_.final_norm, hidden, model_.epsilon,
             input_.data() + std::size_t(i) * hidden);
  team_.meet();
  const __m512 cap = _mm512_set1_ps(model_.logit_softcap);
  multiply(model_.head, input_.data(), batch.num_logits, thread, [&](int row, int column, __m512 left, __m512 right) {
    if (model_.logit_softcap != 0) {
      left = _mm512_mul_ps(tanh(_mm512_div_ps(left, cap)), cap);
      right = _mm512_mul_ps(tanh(_mm512_div_ps(right, cap)), cap);
    }
    float* to = batch.logits + std::size_t(row) * model_.vocab + column;
    const auto rest = [&](int begin) { return __mmask16((1u << std::clamp(model_.vocab - begin, 0, kLanes)) - 1); };
    _mm512_mask_storeu_ps(to, rest(column), left);
    _mm512_mask_storeu_ps(to + kLanes, rest(column + kLanes), right);
  });
}

// The residual's rows under a norm, as input of a product.
const bf16* Forward::normed(const float* weights, int rows, int thread) {
  const int hidden = model_.hidden;
  const bool own = rows <= kOwnRows;
  bf16* to = own ? own_inputs_[thread].data() : input_.data();
  const Share share = own ? Share(rows, 0, 1) : Share(rows, thread, team_.size());
  for (std::size_t row = share.begin; row < std::size_t(share.end); ++row)
    rms_norm(residual_.data() + row * hidden, weights, hidden, model_.epsilon, to + row * hidden);
  if (!own) team_.meet();
  return to;
}

// Calls done(row, column, 16 results, the next 16). Few rows: every thread takes one run of panels, as it comes from
// memory. Many: panels are taken one by one, so that a thread that is held up is not waited for.
template <class Done>
void Forward::multiply(const Linear& linear, const bf16* input, int rows, int thread, Done done) {
  const int panels = panels_of(linear.columns), depth = linear.depth;
  const auto take = [&](int begin, int end) {
    product(rows, input, depth, linear.panels + begin * panel_size(depth), panel_size(depth), end - begin, depth,
            sums_[thread].data(), [&](int row, int panel, __m512 left, __m512 right) {
              const int column = (begin + panel) * kPanel;
              if (linear.bias) {
                left = _mm512_add_ps(left, _mm512_loadu_ps(linear.bias + column));
                right = _mm512_add_ps(right, _mm512_loadu_ps(linear.bias + column + kLanes));
              }
              done(row, column, left, right);
            });
  };
  if (rows <= kMaxRows) {
    const Share share(panels, thread, team_.size());
    for (int panel = share.begin; panel < share.end; panel += 4) take(panel, std::min(panel + 4, share.end));
  } else {
    for (int panel; (panel = team_.next(panels)) < panels;) take(panel, panel + 1);
  }
}

}  // namespace motet
