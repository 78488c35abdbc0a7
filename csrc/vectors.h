// Sixteen floats at a time: conversions, exp2, sums. All of it rounds the same way wherever it is called from.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace motet {

using bf16 = std::uint16_t;  // the upper half of a float's bits

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline __m512 load_bf16(const bf16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline float to_float(std::int8_t x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(std::uint32_t(x) << 16); }

// Rounds to nearest even, as torch does.
inline void store_bf16(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }

// 2^x for x <= 0 (so never infinity), within 2 units in the last place; 0 below -126 and for minus infinity.
inline __m512 exp2_of_negative(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);  // in [-0.5, 0.5]
  __m512 y = _mm512_set1_ps(1.5403530e-4f);     // minimax of 2^part (Cephes, exp2f)
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.3333558e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  return _mm512_maskz_scalef_ps(normal, y, whole);
}

constexpr float kLog2E = 1.4426950408889634f;

// 1 / (1 + e^-x), through the negative side, where nothing overflows.
inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = exp2_of_negative(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-kLog2E)));  // e^-|x|
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_div_ps(_mm512_mask_mov_ps(one, negative, e), _mm512_add_ps(one, e));
}

inline __m512 tanh(__m512 x) {  // 2 sigmoid(2x) - 1
  return _mm512_fmsub_ps(_mm512_set1_ps(2.0f), sigmoid(_mm512_add_ps(x, x)), _mm512_set1_ps(1.0f));
}

inline __mmask16 finite(__m512 x) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(kInfinity), _CMP_LT_OQ);
}

}  // namespace motet
