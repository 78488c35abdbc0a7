// The types of numbers, and the number of lanes of a vector.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace motet {

using bf16 = std::uint16_t;  // the upper half of a float's bits

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float to_float(float x) { return x; }
inline float to_float(std::int8_t x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(std::uint32_t(x) << 16); }

}  // namespace motet
