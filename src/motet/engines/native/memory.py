"""Gives main memory back to the system, and keeps its addresses: structs of the kernels, views and whoever reads from
outside may go on pointing there. What was in it is gone; the system fills a page with zeros when it is next touched."""

import ctypes
import logging
import mmap

import torch

logger = logging.getLogger(__name__)


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
