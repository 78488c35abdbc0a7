// Peak rates of the processor, for measurements: reading memory, and multiplying numbers in the L1 cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "thread_pool.h"

namespace motet {

// Reads all complete cache lines of memory, with all threads. Returns a number that depends on all of them, so that the
// compiler cannot remove a read.
std::uint64_t read_memory(const std::uint64_t* words, std::size_t count, ThreadPool& threads);

// Computes a tile of a bf16 product `tiles` times or a few times more, with all threads. Returns the total number of
// multiplications and additions.
double multiply_tiles(int tiles, ThreadPool& threads);

}  // namespace motet
