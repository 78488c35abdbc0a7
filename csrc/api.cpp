// The functions that Python calls through ctypes.
#include "forward.h"
#include "pack.h"

using namespace motet;

#define MOTET_EXPORT __attribute__((visibility("default")))

extern "C" {

// Returns 1 if this processor has the instructions for which this library is compiled, else 0.
MOTET_EXPORT int motet_supported() { return supported(); }

// Writes the sizes of the structs in bytes, which Python compares with those of its mirrors.
MOTET_EXPORT void motet_sizes(std::int32_t sizes[6]) {
  sizes[0] = sizeof(Linear);
  sizes[1] = sizeof(Layer);
  sizes[2] = sizeof(Model);
  sizes[3] = sizeof(Batch);
  sizes[4] = sizeof(Piece);
  sizes[5] = sizeof(Span);
}

// Packs weight [columns][depth] into panels. With `other`: 16 columns of `weight`, the same 16 of `other`, and so on.
MOTET_EXPORT void motet_pack(bf16* panels, const bf16* weight, const bf16* other, std::int32_t columns,
                             std::int32_t depth) {
  for (int half = 0; half * kLanes < columns; ++half) {
    const auto pack = [&](const bf16* from, int place) {
      bf16* to = panels + place / 2 * panel_size(depth) + place % 2 * kPanel;
      pack_columns(to, depth, [&](int i) {
        const int column = half * kLanes + i;
        return column < columns ? from + std::size_t(column) * depth : nullptr;
      });
    };
    if (other) {
      pack(weight, 2 * half);
      pack(other, 2 * half + 1);
    } else {
      pack(weight, half);
    }
  }
}

MOTET_EXPORT void* motet_open(const Model* model, std::int32_t num_threads) { return new Forward(*model, num_threads); }
MOTET_EXPORT void motet_run(void* forward, const Batch* batch) { static_cast<Forward*>(forward)->run(*batch); }

// Computes a single product, for tests and measurements.
MOTET_EXPORT void motet_multiply(void* forward, const Linear* linear, const bf16* input, std::int32_t rows,
                                 float* output) {
  static_cast<Forward*>(forward)->multiply(*linear, input, rows, output);
}

MOTET_EXPORT void motet_close(void* forward) { delete static_cast<Forward*>(forward); }

}  // extern "C"
