"""Measures the device's best rates: the rate of a large copy, and the rate of a product of large matrices."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Ceilings:
    bytes_per_s: float
    """Rate at which a copy reads and writes memory."""
    operations_per_s: float
    """Rate of multiplications and additions in a product of matrices in the model's dtype."""


def ceilings(device: torch.device, dtype: torch.dtype, *, copy_bytes: int, matrix: int) -> Ceilings:
    return Ceilings(2 * copy_bytes / copy_s(device, copy_bytes), 2 * matrix**3 / product_s(device, dtype, matrix))


def copy_s(device: torch.device, num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source), device)


def product_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # zeros would run faster
    out = torch.empty_like(a)
    return seconds(lambda: torch.mm(a, b, out=out), device)


def seconds(work: Callable[[], object], device: torch.device, *, repeats: int = 10) -> float:
    """Returns the median time, after three runs to warm up."""
    times = []
    for _ in range(3 + repeats):
        settle(device)
        start = time.perf_counter()
        work()
        settle(device)
        times.append(time.perf_counter() - start)
    return median(times[3:])


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
