// Operations on single rows between matrix products: norms, RoPE, activations.
#pragma once

#include "vectors.h"

namespace motet {

// Returns the factor of a row in a root mean square norm (Zhang and Sennrich, 2019), applied before the weights.
inline Floats rms_factor(const float* x, int size, float epsilon) {
  Floats squares = all(0.0f);
  for (int at = 0; at < size; at += kLanes) {
    const Floats v = load(x + at);
    squares = fma(v, v, squares);
  }
  const float mean = sum(squares) / float(size);
  return all(1.0f) / sqrt(all(mean + epsilon));
}

// Writes the norm of row `x` to row `to`, which can be `x` itself.
template <class Number>
inline void rms_norm(const float* x, const float* weights, int size, float epsilon, Number* to) {
  const Floats factor = rms_factor(x, size, epsilon);
  for (int at = 0; at < size; at += kLanes) store(to + at, load(x + at) * factor * load(weights + at));
}

// Adds the norm of a row to `sum`.
inline void add_rms_norm(const float* x, const float* weights, int size, float epsilon, float* sum) {
  const Floats factor = rms_factor(x, size, epsilon);
  for (int at = 0; at < size; at += kLanes) {
    const Floats y = load(x + at) * factor * load(weights + at);
    store(sum + at, load(sum + at) + y);
  }
}

// Applies rotary position embedding (Su et al., 2021) to one head. Halves are paired as in Hugging Face's models.
inline void rotate(float* x, const float* cosines, const float* sines, int head_dim) {
  const int half = head_dim / 2;
  for (int at = 0; at < half; at += kLanes) {
    const Floats a = load(x + at), b = load(x + half + at);
    const Floats c = load(cosines + at), s = load(sines + at);
    store(x + at, fms(a, c, b * s));
    store(x + half + at, fma(b, c, a * s));
  }
}

// Stores numbers clamped to [-limit, limit], and 0 for NaN, because a masked key has weight 0, and 0 times infinity is
// NaN. Returns true if all numbers were finite.
template <class Number>
inline bool store_finite(Number* to, const float* x, int size, float limit) {
  const Floats top = all(limit), bottom = all(-limit);
  bool all_finite = true;
  for (int at = 0; at < size; at += kLanes) {
    const Floats v = load(x + at);
    all_finite &= every(finite(v));
    store(to + at, choose(numbers(v), max(min(v, top), bottom), all(0.0f)));
  }
  return all_finite;
}

inline Floats silu(Floats x) { return x * sigmoid(x); }

// GELU, tanh form (Hendrycks and Gimpel, 2016): 0.5 x (1 + tanh(y)) = x sigmoid(2 y).
inline Floats gelu_tanh(Floats x) {
  const Floats y = fma(x * x * x, all(0.044715f), x) * all(0.7978845608f);
  return x * sigmoid(y + y);
}

}  // namespace motet
