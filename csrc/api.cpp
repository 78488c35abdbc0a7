// The functions that Python calls through ctypes.
#include "forward.h"
#include "pack.h"
#include "peak_rates.h"
#include "sampling.h"

using namespace motet;

namespace {

// Packs weight [columns][depth] into panels. Two halves of 16 columns make a panel: the first 16 columns become half
// number `first`, and each further 16 columns the half `every` later.
template <class Number>
void pack_weight(void* panels, const void* weight, int first, int every, int columns, int depth) {
  for (int half = 0; half * kLanes < columns; ++half) {
    const int to_half = first + half * every;
    Number* to = static_cast<Number*>(panels) + to_half / 2 * panel_size(depth) + to_half % 2 * kRegister<Number>;
    pack_columns(to, depth, [&](int i) {
      const int column = half * kLanes + i;
      return column < columns ? static_cast<const Number*>(weight) + std::size_t(column) * depth : nullptr;
    });
  }
}

}  // namespace

#define MOTET_EXPORT __attribute__((visibility("default")))

extern "C" {

// Returns 1 if this processor has the instructions for which this library is compiled, else 0.
MOTET_EXPORT int motet_supported() { return supported(); }

// Writes the sizes of the structs in bytes, which Python compares with the sizes of its mirrors.
MOTET_EXPORT void motet_sizes(std::int32_t sizes[8]) {
  sizes[0] = sizeof(Linear);
  sizes[1] = sizeof(Layer);
  sizes[2] = sizeof(Model);
  sizes[3] = sizeof(Batch);
  sizes[4] = sizeof(Piece);
  sizes[5] = sizeof(Span);
  sizes[6] = sizeof(SamplingArguments);
  sizes[7] = sizeof(LowRank);
}

// Packs a weight with numbers of a type of `Numbers` into panels of the same type. `panels` is the caller's memory.
MOTET_EXPORT void motet_pack(std::int32_t numbers, void* panels, const void* weight, std::int32_t first,
                             std::int32_t every, std::int32_t columns, std::int32_t depth) {
  if (numbers == kFloat32)
    pack_weight<float>(panels, weight, first, every, columns, depth);
  else
    pack_weight<bf16>(panels, weight, first, every, columns, depth);
}

// Returns the forward pass of a model, which the caller closes. The model must outlive it.
MOTET_EXPORT void* motet_open(const Model* model, std::int32_t num_threads) {
  return Forward::of(*model, num_threads).release();
}
MOTET_EXPORT void motet_run(void* forward, const Batch* batch) { static_cast<Forward*>(forward)->run(*batch); }

// Computes a single product, for tests and measurements.
MOTET_EXPORT void motet_multiply(void* forward, const Linear* linear, const void* input, std::int32_t rows,
                                 float* output) {
  static_cast<Forward*>(forward)->multiply(*linear, input, rows, output);
}

// Reads memory, for measurements; returns a number that depends on all of it.
MOTET_EXPORT std::uint64_t motet_read_memory(void* forward, const void* memory, std::uint64_t bytes) {
  return read_memory(static_cast<const std::uint64_t*>(memory), bytes / sizeof(std::uint64_t),
                     static_cast<Forward*>(forward)->threads());
}

// Computes tiles of a product in the L1 cache, for measurements; returns the number of multiplications and additions.
MOTET_EXPORT double motet_multiply_tiles(void* forward, std::int32_t tiles) {
  return multiply_tiles(tiles, static_cast<Forward*>(forward)->threads());
}

MOTET_EXPORT void motet_close(void* forward) { delete static_cast<Forward*>(forward); }

// Sampling, which needs no model. The caller closes the sampler.
MOTET_EXPORT void* motet_open_sampler(std::int32_t vocab, std::int32_t num_threads) {
  return new Sampler(vocab, num_threads);
}
MOTET_EXPORT void motet_sample(void* sampler, const SamplingArguments* args) {
  static_cast<Sampler*>(sampler)->run(*args);
}
MOTET_EXPORT void motet_close_sampler(void* sampler) { delete static_cast<Sampler*>(sampler); }

}  // extern "C"
