// What the processor can do at best, for measurements: read memory, and multiply numbers that lie in its nearest cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "team.h"

namespace motet {

// Reads all whole cache lines of memory, with all threads. Returns a number that depends on them, so that no compiler
// leaves one out.
std::uint64_t read_memory(const std::uint64_t* words, std::size_t count, Team& team);

// Computes one tile of a bf16 product over and over, with all threads. Returns the number of multiplications and
// additions in it.
double multiply_tiles(int tiles, Team& team);

}  // namespace motet
