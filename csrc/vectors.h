// exp2, sigmoid and tanh of sixteen floats at a time, whose rounding does not depend on the caller, and partial stores.
#pragma once

#include <algorithm>

#include "floats.h"  // from avx512 or avx2

namespace motet {

// Returns 2^x for x <= 0, within 2 units in the last place; 0 for x < -126, including minus infinity.
inline Floats exp2_of_negative(Floats x) {
  const Floats integer = round(x);
  const Floats fraction = x - integer;  // in [-0.5, 0.5]
  Floats y = all(1.5403530e-4f);        // minimax of 2^fraction (Cephes, exp2f)
  y = fma(y, fraction, all(1.3333558e-3f));
  y = fma(y, fraction, all(9.6181291e-3f));
  y = fma(y, fraction, all(5.5504109e-2f));
  y = fma(y, fraction, all(2.4022651e-1f));
  y = fma(y, fraction, all(6.9314718e-1f));
  y = fma(y, fraction, all(1.0f));
  return choose(at_least(x, all(-126.0f)), times_power(y, integer), all(0.0f));
}

constexpr float kLog2E = 1.4426950408889634f;

// Returns 1 / (1 + e^-x), computed from e^-|x|, which cannot overflow.
inline Floats sigmoid(Floats x) {
  const Floats one = all(1.0f);
  const Floats e = exp2_of_negative(abs(x) * all(-kLog2E));  // e^-|x|
  return choose(less(x, all(0.0f)), e, one) / (one + e);
}

inline Floats tanh(Floats x) { return fms(all(2.0f), sigmoid(x + x), all(1.0f)); }  // 2 sigmoid(2x) - 1

// Stores the first `count` lanes, or all lanes if there are fewer.
template <class Number>
inline void store_first(Number* to, Floats x, int count) {
  if (count >= kLanes) return store(to, x);
  Number stored[kLanes];
  store(stored, x);
  std::copy_n(stored, count, to);
}

inline Mask finite(Floats x) { return less(abs(x), all(kInfinity)); }

}  // namespace motet
