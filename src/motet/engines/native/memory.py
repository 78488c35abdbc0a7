"""Takes main memory in huge pages, and gives it back to the system with its addresses kept: structs of the kernels,
views and whoever reads from outside may go on pointing there. What was in it is gone; the system fills a page with
zeros when it is next touched."""

import ctypes
import logging
import mmap
from contextlib import suppress

import torch

logger = logging.getLogger(__name__)


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Returns zeros, uint8, in huge pages if the system has them. A step reads weights and KV from end to end, and
    would otherwise miss the processor's table of pages every few kilobytes. Raises OSError if the system refuses."""
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
