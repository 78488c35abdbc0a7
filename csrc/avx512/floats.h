// Sixteen floats in one register: AVX-512.
#pragma once

#include <immintrin.h>

#include "number_types.h"

namespace motet {

using Floats = __m512;  // the compiler defines + - * / for it
using Mask = __mmask16;

inline bool supported() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw"); }

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }

inline Floats load(const bf16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

// Rounds to nearest even, as torch does.
inline void store(bf16* to, Floats x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }   // a * b + c
inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }   // a * b - c
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }                  // b if one is NaN
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats abs(Floats x) { return _mm512_abs_ps(x); }
inline Floats sqrt(Floats x) { return _mm512_sqrt_ps(x); }
inline Floats round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Returns x * 2^exponent for exponents from -126 to 0.
inline Floats times_power(Floats x, Floats exponent) { return _mm512_scalef_ps(x, exponent); }
inline float first(Floats x) { return _mm512_cvtss_f32(x); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Floats x) { return _mm512_reduce_max_ps(x); }

inline Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask numbers(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q); }
inline bool every(Mask mask) { return mask == 0xffff; }
inline unsigned bits(Mask mask) { return mask; }  // lane i is bit i
inline Floats choose(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }

// Selects lanes [begin, end); the range can extend beyond the lanes.
inline Mask lanes(int begin, int end) {
  const auto below = [](int lane) { return Mask((1u << (lane < 0 ? 0 : lane < kLanes ? lane : kLanes)) - 1); };
  return below(end) & ~below(begin);
}

inline void store(float* to, Floats x, Mask mask) { _mm512_mask_storeu_ps(to, mask, x); }

}  // namespace motet
