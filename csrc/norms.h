// Norms of rows and heads.
#pragma once

#include "model.h"

namespace motet {

// Returns the mean of x.
inline float mean_of(const float* x, int size) {
  Floats total = all(0.0f);
  for (int at = 0; at < size; at += kLanes) total = total + load(x + at);
  return sum(total) / float(size);
}

// Returns the factor of a row in a norm: the inverse of the root mean square of its differences from `center`.
inline Floats norm_factor(const float* x, int size, Floats center, float epsilon) {
  Floats squares = all(0.0f);
  for (int at = 0; at < size; at += kLanes) {
    const Floats v = load(x + at) - center;
    squares = fma(v, v, squares);
  }
  const float mean = sum(squares) / float(size);
  return all(1.0f) / sqrt(all(mean + epsilon));
}

// Calls done(at, y) for every 16 numbers y of the norm of x, a group of numbers: the root mean square norm (Zhang and
// Sennrich, 2019), or the norm of differences from the mean (Ba et al., 2016).
template <class Done>
inline void each_of_norm(const Norm& norm, const float* x, int group, Done done) {
  const float* weight = norm.weight + group * norm.stride;
  const Floats center = all(norm.centered ? mean_of(x, norm.width) : 0.0f);
  const Floats factor = norm_factor(x, norm.width, center, norm.epsilon);
  const float* bias = norm.bias ? norm.bias + group * norm.stride : nullptr;
  for (int at = 0; at < norm.width; at += kLanes) {
    const Floats y = (load(x + at) - center) * factor * load(weight + at);
    done(at, bias ? y + load(bias + at) : y);
  }
}

// Writes the norm of row `x` to row `to`, which can be `x` itself. Without a norm, writes the row.
template <class Number>
inline void apply_norm(const Norm& norm, const float* x, int size, Number* to) {
  if (norm.weight) return each_of_norm(norm, x, 0, [&](int at, Floats y) { store(to + at, y); });
  for (int at = 0; at < size; at += kLanes) store(to + at, load(x + at));
}

// Applies a norm to the numbers of several heads in place.
inline void norm_heads(const Norm& norm, float* x, int size) {
  if (!norm.weight) return;
  for (int group = 0; group * norm.width < size; ++group) {
    float* here = x + group * norm.width;
    each_of_norm(norm, here, group, [&](int at, Floats y) { store(here + at, y); });
  }
}

// Adds `scale` times the norm of a row to `total`.
inline void add_norm(const Norm& norm, const float* x, float scale, float* total) {
  each_of_norm(norm, x, 0, [&](int at, Floats y) { store(total + at, fma(y, all(scale), load(total + at))); });
}

}  // namespace motet
