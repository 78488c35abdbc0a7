// The uniform number of a sampled token, a pure function of the choice's seed and the token's position: Philox4x32-10
// (Salmon, Moraes, Dror and Shaw, 2011), with the seed as key and the position as counter, as in `sample/philox.py`.
#pragma once

#include <cstdint>

namespace motet {

// Returns a number in [0, 1) with 53 random bits.
inline double uniform_at(std::uint64_t seed, std::uint64_t position) {
  const auto low = [](std::uint64_t x) { return std::uint32_t(x); };
  const auto high = [](std::uint64_t x) { return std::uint32_t(x >> 32); };
  std::uint32_t words[4] = {low(position), high(position), 0, 0}, key[2] = {low(seed), high(seed)};
  for (int round = 0; round < 10; ++round, key[0] += 0x9E3779B9, key[1] += 0xBB67AE85) {
    const std::uint64_t first = std::uint64_t(words[0]) * 0xD2511F53, third = std::uint64_t(words[2]) * 0xCD9E8D57;
    words[0] = high(third) ^ words[1] ^ key[0];
    words[1] = low(third);
    words[2] = high(first) ^ words[3] ^ key[1];
    words[3] = low(first);
  }
  return double((std::uint64_t(words[0]) << 32 | words[1]) >> 11) * 0x1p-53;
}

}  // namespace motet
