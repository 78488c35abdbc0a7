// Operations on single rows between matrix products: RoPE, and storing in the KV cache.
#pragma once

#include "model.h"

namespace motet {

// Applies rotary position embedding (Su et al., 2021) to one head, at the position of the cosines and sines.
inline void rotate(const Rotary& rotary, const float* cosines, const float* sines, float* x) {
  const int half = rotary.dims / 2;
  if (rotary.adjacent) {
    for (int i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
    return;
  }
  int at = 0;
  for (; at + kLanes <= half; at += kLanes) {
    const Floats a = load(x + at), b = load(x + half + at);
    const Floats c = load(cosines + at), s = load(sines + at);
    store(x + at, fms(a, c, b * s));
    store(x + half + at, fma(b, c, a * s));
  }
  for (; at < half; ++at) {
    const float a = x[at], b = x[half + at];
    x[at] = a * cosines[at] - b * sines[at];
    x[half + at] = b * cosines[at] + a * sines[at];
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

}  // namespace motet
