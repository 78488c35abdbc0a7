#include "peak_rates.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "tile.h"

namespace motet {
namespace {

constexpr std::size_t kLine = 64 / sizeof(std::uint64_t);  // words of a cache line
constexpr std::size_t kPiece = 1 << 15;                    // words
constexpr std::size_t kAhead = 32 * kLine;
constexpr int kDepth = 256, kTiles = 200;  // depth of a tile; tiles per iteration

}  // namespace

std::uint64_t read_memory(const std::uint64_t* words, std::size_t count, ThreadPool& threads) {
  std::atomic<std::uint64_t> all{0};
  threads.parallel_for(int((count + kPiece - 1) / kPiece), [&](std::size_t piece, int) {
    const std::uint64_t* const end = words + std::min(count, (piece + 1) * kPiece);
    std::uint64_t mixed[kLine] = {};
    for (const std::uint64_t* line = words + piece * kPiece; line + kLine <= end; line += kLine) {
      _mm_prefetch((const char*)(line + kAhead), _MM_HINT_T0);
      for (std::size_t i = 0; i < kLine; ++i) mixed[i] ^= line[i];
    }
    for (const std::uint64_t one : mixed) all ^= one;
  });
  return all;
}

double multiply_tiles(int tiles, ThreadPool& threads) {
  const std::vector<bf16> a(kMaxRows * kDepth, 0x3f80), b(panel_size(kDepth), 0x3f80);  // ones
  const int pieces = (tiles + kTiles - 1) / kTiles;
  std::vector<float> results(pieces * kLanes);
  threads.parallel_for(pieces, [&](int piece, int) {
    Floats result = all(0.0f);
    for (int i = 0; i < kTiles; ++i)
      tile<kMaxRows, 1>(
          a.data(), kDepth, b.data(), 0, kDepth / kDeep<bf16>, [](const bf16*) {},
          [](int, int, int) { return all(0.0f); },
          [&](int, int, Floats left, Floats right) { result = result + left + right; });
    store(results.data() + piece * kLanes, result);
  });
  return 2.0 * kMaxRows * kPanel * kDepth * kTiles * pieces;
}

}  // namespace motet
