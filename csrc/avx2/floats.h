// Sixteen floats in two registers: AVX2 with FMA.
#pragma once

#include <immintrin.h>

#include "number_types.h"

namespace motet {

struct Floats {
  __m256 low, high;
};
using Mask = Floats;  // a lane has all bits set, or none

inline bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}

inline Floats load(const bf16* from) {
  const auto eight = [](const bf16* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16));
  };
  return {eight(from), eight(from + 8)};
}

// Rounds to nearest even, as torch does; NaN stays NaN.
inline void store(bf16* to, Floats x) {
  const auto rounded = [](__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, none), 16);
  };
  const __m256i mixed = _mm256_packus_epi32(rounded(x.low), rounded(x.high));  // quarters in the order 0 2 1 3
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(mixed, 0b11011000));
}

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

inline Floats fma(Floats a, Floats b, Floats c) {  // a * b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fms(Floats a, Floats b, Floats c) {  // a * b - c
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats min(Floats a, Floats b) {  // b if one is NaN
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Floats sqrt(Floats x) { return {_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
inline Floats round(Floats x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kNearest), _mm256_round_ps(x.high, kNearest)};
}

// Returns x * 2^exponent for exponents from -126 to 0.
inline Floats times_power(Floats x, Floats exponent) {
  const auto power = [](__m256 x) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  };
  return x * Floats{power(exponent.low), power(exponent.high)};
}

inline float first(Floats x) { return _mm256_cvtss_f32(x.low); }

// Combines all lanes: the two halves with each other, then the halves of the result, until one lane is left.
template <class Both>
inline float fold(Floats x, Both both) {
  const __m256 eight = both(x.low, x.high);
  const __m256 four = both(eight, _mm256_permute2f128_ps(eight, eight, 1));
  const __m256 two = both(four, _mm256_permute_ps(four, 0b01001110));
  return _mm256_cvtss_f32(both(two, _mm256_permute_ps(two, 0b10110001)));
}
inline float sum(Floats x) {
  return fold(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
inline float reduce_max(Floats x) {
  return fold(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}

template <int Comparison>
inline Mask compare(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, Comparison), _mm256_cmp_ps(a.high, b.high, Comparison)};
}
inline Mask less(Floats a, Floats b) { return compare<_CMP_LT_OQ>(a, b); }
inline Mask at_least(Floats a, Floats b) { return compare<_CMP_GE_OQ>(a, b); }
inline Mask numbers(Floats x) { return compare<_CMP_ORD_Q>(x, x); }
inline bool every(Mask mask) { return _mm256_movemask_ps(_mm256_and_ps(mask.low, mask.high)) == 0xff; }
inline unsigned bits(Mask mask) {  // lane i is bit i
  return unsigned(_mm256_movemask_ps(mask.low)) | unsigned(_mm256_movemask_ps(mask.high)) << 8;
}
inline Floats choose(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, mask.low), _mm256_blendv_ps(no.high, yes.high, mask.high)};
}

// Selects lanes [begin, end); the range can extend beyond the lanes.
inline Mask lanes(int begin, int end) {
  const auto eight = [&](int from) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane);
    return _mm256_castsi256_ps(_mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane)));
  };
  return {eight(0), eight(8)};
}

inline void store(float* to, Floats x, Mask mask) {
  _mm256_maskstore_ps(to, _mm256_castps_si256(mask.low), x.low);
  _mm256_maskstore_ps(to + 8, _mm256_castps_si256(mask.high), x.high);
}

}  // namespace motet
