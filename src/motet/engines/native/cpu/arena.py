"""Memory for weights, taken once, in huge pages where the system gives them: what a step reads from end to end would
otherwise miss the processor's table of pages every few kilobytes."""

import math
import mmap
from contextlib import suppress

import torch

_ALIGNMENT = 64


class Arena:
    """Hands out parts of one run of memory; all of it is freed with the last tensor in it."""

    def __init__(self, num_bytes: int, num_parts: int) -> None:
        """Room for `num_parts` parts of `num_bytes` in all."""
        memory = mmap.mmap(-1, num_bytes + num_parts * _ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them says so
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        part = self._memory[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype).view(shape)
