// What happens to single rows between matrix products: norms, rotary positions, activations.
#pragma once

#include "vectors.h"

namespace motet {

// Root mean square norm (Zhang and Sennrich, 2019): factor to multiply a row with before the weights.
inline __m512 rms_factor(const float* x, int size, float epsilon) {
  __m512 squares = _mm512_setzero_ps();
  for (int at = 0; at < size; at += kLanes) {
    const __m512 v = _mm512_loadu_ps(x + at);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / float(size);
  return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(_mm512_set1_ps(mean + epsilon)));
}

inline void rms_norm(const float* x, const float* weights, int size, float epsilon, bf16* to) {
  const __m512 factor = rms_factor(x, size, epsilon);
  for (int at = 0; at < size; at += kLanes)
    store_bf16(to + at, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + at), factor), _mm512_loadu_ps(weights + at)));
}

// In place, float32; adds the result to `sum` if there is one.
inline void rms_norm(float* x, const float* weights, int size, float epsilon, float* sum = nullptr) {
  const __m512 factor = rms_factor(x, size, epsilon);
  for (int at = 0; at < size; at += kLanes) {
    const __m512 y = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + at), factor), _mm512_loadu_ps(weights + at));
    _mm512_storeu_ps(sum ? sum + at : x + at, sum ? _mm512_add_ps(_mm512_loadu_ps(sum + at), y) : y);
  }
}

// Rotary position embedding (Su et al., 2021) of one head, halves paired as in Hugging Face's models.
inline void turn(float* x, const float* cosines, const float* sines, int head_dim) {
  const int half = head_dim / 2;
  for (int at = 0; at < half; at += kLanes) {
    const __m512 a = _mm512_loadu_ps(x + at), b = _mm512_loadu_ps(x + half + at);
    const __m512 c = _mm512_loadu_ps(cosines + at), s = _mm512_loadu_ps(sines + at);
    _mm512_storeu_ps(x + at, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    _mm512_storeu_ps(x + half + at, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
}

// Stores what is finite and within the limit, the limit for what is beyond, 0 for what is no number: a masked key is
// masked by a weight of 0, which cannot undo an infinity. Returns whether all was finite.
inline bool store_sound(bf16* to, const float* x, int size, float limit) {
  const __m512 top = _mm512_set1_ps(limit), bottom = _mm512_set1_ps(-limit);
  bool sound = true;
  for (int at = 0; at < size; at += kLanes) {
    const __m512 v = _mm512_loadu_ps(x + at);
    sound &= finite(v) == 0xffff;
    const __mmask16 number = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
    store_bf16(to + at, _mm512_maskz_max_ps(number, _mm512_min_ps(v, top), bottom));
  }
  return sound;
}

inline __m512 silu(__m512 x) { return _mm512_mul_ps(x, sigmoid(x)); }

// GELU, tanh form (Hendrycks and Gimpel, 2016): 0.5 x (1 + tanh(y)) = x sigmoid(2 y).
inline __m512 gelu_tanh(__m512 x) {
  const __m512 cubed = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 y = _mm512_mul_ps(_mm512_fmadd_ps(cubed, _mm512_set1_ps(0.044715f), x), _mm512_set1_ps(0.7978845608f));
  return _mm512_mul_ps(x, sigmoid(_mm512_add_ps(y, y)));
}

}  // namespace motet
