"""Reserves main memory in huge pages, and returns pages to the system while their addresses stay valid.

Reserved memory costs nothing until it is first written: then the system provides a page of zeros (2 MiB if it has huge
pages, which takes 0.1 to 0.2 ms). If the system has no page left, it kills a process, so callers reserve only what the
machine has (`motet.system.machine`).

Structs of the kernels, views, and other processes that read the memory can keep pointing to returned pages. The content
of these pages is lost: the system fills a page with zeros when it is next used.
"""

import ctypes
import logging
import mmap
import sys
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)

HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""The advice to use huge pages; None on macOS and Windows."""
PRIVATE_MEMORY = sum(getattr(mmap, name, 0) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS"))
DONT_NEED: int = getattr(mmap, "MADV_DONTNEED", 0)
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later, which Python has no name for."""
HUGE_PAGE_BYTES = 2 << 20
ON_LINUX = bool(sys.platform == "linux")
"""Linux takes released pages back at once, and provides zeros at their next use. On other systems `madvise` does not
exist, or permits the system to keep the content. (A comparison in the functions would make mypy skip their code.)"""


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Returns zeros [num_bytes] uint8, in huge pages if the system supports them. A step reads weights and KV from
    start to end; with small pages it would miss the processor's translation lookaside buffer every few kilobytes.
    Raises OSError if the system refuses the memory."""
    allocate: Any = mmap.mmap  # its arguments depend on the system
    if HUGE_PAGES is None:
        return torch.frombuffer(allocate(-1, num_bytes), dtype=torch.uint8)
    memory = allocate(-1, num_bytes, flags=PRIVATE_MEMORY)
    with suppress(OSError):  # the kernel was built without huge pages
        memory.madvise(HUGE_PAGES)
    return torch.frombuffer(memory, dtype=torch.uint8)


def populate_pages(tensor: torch.Tensor) -> None:
    """Provides the pages of a contiguous tensor in main memory before they are written. Their content stays. Does
    nothing where the system cannot: the pages are then provided when they are first written."""
    if not ON_LINUX:
        return
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - begin
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), POPULATE_WRITE)


def release_pages(tensor: torch.Tensor) -> None:
    """Returns the pages of a contiguous tensor in main memory to the system. A page at either end that also contains
    other data is not returned. Only Linux takes pages back and provides zeros at the next use."""
    if not ON_LINUX:
        logger.warning(
            "%d bytes of memory stay in use: only Linux takes back pages of a running process", tensor.nbytes
        )
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if num_bytes <= 0:
        return
    system = ctypes.CDLL(None, use_errno=True)
    if system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), DONT_NEED):
        logger.warning("the system did not take back %d bytes of memory: error %d", num_bytes, ctypes.get_errno())


def trim_heap() -> None:
    """Returns the heap memory of freed objects to the system, if the C library is glibc."""
    with suppress(AttributeError, TypeError):  # macOS has no such function, and a Windows process no library of its own
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
