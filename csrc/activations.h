// The activations that transformers names, of sixteen floats at a time.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace motet {

enum Activation : std::int32_t {
  kSilu = 0,
  kGeluTanh,
  kGelu,
  kQuickGelu,
  kRelu,
  kReluSquared,
  kRelu6,
  kTanh,
  kSigmoid,
  kIdentity,
  kLeakyRelu,
  kMish,
  kLaplace,
  kClippedGelu,
  kHardSwish,
};

inline Floats silu(Floats x) { return x * sigmoid(x); }

// GELU, tanh form (Hendrycks and Gimpel, 2016): 0.5 x (1 + tanh(y)) = x sigmoid(2 y).
inline Floats gelu_tanh(Floats x) {
  const Floats y = fma(x * x * x, all(0.044715f), x) * all(0.7978845608f);
  return x * sigmoid(y + y);
}

// Returns erfc(x) with a relative error of 2e-7: t e^(polynomial(t) - x^2), t = 1 / (1 + |x| / 2) (Numerical Recipes).
inline Floats erfc(Floats x) {
  const Floats z = abs(x), t = all(1.0f) / fma(z, all(0.5f), all(1.0f));
  Floats y = all(0.17087277f);
  for (const float factor : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                             0.37409196f, 1.00002368f, -1.26551223f})
    y = fma(y, t, all(factor));
  const Floats right = t * exp2_of_negative((y - z * z) * all(kLog2E));
  return choose(less(x, all(0.0f)), all(2.0f) - right, right);
}

inline Floats gelu(Floats x) { return all(0.5f) * x * erfc(x * all(-0.7071067812f)); }

// x tanh(log(1 + e^x)) (Misra, 2019), computed from e^-|x|, which cannot overflow.
inline Floats mish(Floats x) {
  const Mask negative = less(x, all(0.0f));
  const Floats e = exp2_of_negative(abs(x) * all(-kLog2E)), two = all(2.0f), square = e * e;
  const Floats top = choose(negative, fma(two, e, square), fma(two, e, all(1.0f)));
  return x * top / (top + choose(negative, two, two * square));
}

// Returns the value of an activation. Not inlined: a product has one call for 16 columns, and many instances.
[[gnu::noinline]] inline Floats activate_rarely(std::int32_t activation, Floats x) {
  const Floats zero = all(0.0f), relu = max(zero, x);  // NaN stays NaN
  switch (activation) {
    case kGelu: return gelu(x);
    case kQuickGelu: return x * sigmoid(x * all(1.702f));
    case kRelu: return relu;
    case kReluSquared: return relu * relu;
    case kRelu6: return min(all(6.0f), relu);
    case kTanh: return tanh(x);
    case kSigmoid: return sigmoid(x);
    case kLeakyRelu: return choose(less(x, zero), x * all(0.01f), x);
    case kMish: return mish(x);
    case kLaplace: return all(0.5f) * erfc((all(0.707107f) - x) * all(float(1 / (0.282095 * 1.4142135623730951))));
    case kClippedGelu: return max(all(-10.0f), min(all(10.0f), gelu(x)));
    case kHardSwish: return x * min(all(6.0f), max(zero, x + all(3.0f))) * all(1.0f / 6);
    default: return x;
  }
}

inline Floats activate(std::int32_t activation, Floats x) {
  if (activation == kSilu) return silu(x);
  if (activation == kGeluTanh) return gelu_tanh(x);
  return activate_rarely(activation, x);
}

}  // namespace motet
