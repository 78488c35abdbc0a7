"""Main memory by pages: taken in huge ones, and given back to the system for a while.

Memory that is given back keeps its addresses: structs of the kernels, views and whoever reads from outside may go on
pointing there. What was in it is gone; the system fills a page with zeros when it is next touched.
"""

import ctypes
import logging
import math
import mmap
from contextlib import suppress

import torch

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes of a cache line."""


class Arena:
    """Hands out parts of one run of memory; all of it is freed with the last tensor in it.

    It is allocated once, in huge pages if the system has them: a step reads all of it, and would otherwise miss the
    processor's table of pages every few kilobytes.
    """

    def __init__(self, num_bytes: int, num_parts: int) -> None:
        """Makes room for `num_parts` parts of `num_bytes` in all."""
        self.memory = huge_pages(num_bytes + num_parts * ALIGNMENT)
        self._used = 0

    @classmethod
    def like(cls, other: "Arena") -> "Arena":
        """Returns an arena with the same content in memory of its own."""
        arena = cls(len(other.memory), 0)
        arena.memory.copy_(other.memory)
        return arena

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        part = self.memory[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return part.view(dtype).view(shape)

    def moved(self, tensor: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Returns the part of `to`, a copy of the arena's memory, where `tensor` lies here; a clone if it lies
        elsewhere."""
        begin = tensor.data_ptr() - self.memory.data_ptr()
        if not 0 <= begin < len(self.memory):
            return tensor.clone()
        return to[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Returns zeros, uint8, in huge pages if the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages refuses
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def give_back(tensor: torch.Tensor) -> None:
    """Gives back the whole pages of a contiguous tensor in main memory. A page at either end that it shares with other
    data stays as it is."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if num_bytes <= 0:
        return
    system = ctypes.CDLL(None, use_errno=True)
    if system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED):
        logger.warning("the system does not take %d bytes back: error %d", num_bytes, ctypes.get_errno())


def trim_heap() -> None:
    """Gives back what freed objects have left behind, where glibc is the C library."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(ctypes.c_size_t(0))
