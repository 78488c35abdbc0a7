"""Weights as the kernels read them: in panels of 32 columns (`csrc/gemm.h`), in bf16 or in int8.

int8 is symmetric with one scale a column, which its sum is multiplied with at the end. Scales for groups of 128 of a
column's numbers would halve the error (docs/log.md), but have to be applied amid the sum.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from motet.engines.native.cpu import library as c
from motet.engines.native.cpu.arena import Arena

MOST = 127
"""-128 stays unused, so that a column and its negative are alike."""


@dataclass(frozen=True, eq=False)
class Panels:
    numbers: torch.Tensor
    """[panels, depth, 32] bf16 or int8, in the order of `csrc/gemm.h`."""
    scales: torch.Tensor | None
    """[panels * 32] float32, of int8."""


class Packer:
    """Puts weights of known shapes [columns, depth] into panels that lie side by side in memory."""

    def __init__(self, kernels: ctypes.CDLL, shapes: Iterable[tuple[int, int]], *, int8: bool) -> None:
        self._kernels = kernels
        self._dtype = torch.int8 if int8 else torch.bfloat16
        sizes = [num_panels(columns) * c.PANEL * depth * self._dtype.itemsize for columns, depth in shapes]
        self._arena = Arena(sum(sizes), len(sizes))

    def pack(self, weight: torch.Tensor, beside: torch.Tensor | None = None) -> Panels:
        """A bf16 weight, or 16 columns of it and the same 16 of the one `beside` it, in turns."""
        columns, depth = weight.shape
        shape = (num_panels(columns if beside is None else 2 * columns), depth, c.PANEL)
        numbers = self._arena.take(shape, self._dtype)
        int8 = self._dtype == torch.int8
        panels = torch.zeros(shape, dtype=torch.bfloat16) if int8 else numbers
        other = None if beside is None else beside.data_ptr()
        self._kernels.motet_pack(panels.data_ptr(), weight.data_ptr(), other, columns, depth)
        return Panels(numbers, quantize(panels, numbers) if int8 else None)


def quantize(panels: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Writes panels in bf16 `to` such in int8; returns what a column's numbers are multiples of, [panels * 32]."""
    count, depth, _ = panels.shape
    pairs = panels.view(count, depth // 2, 2, c.PANEL // 2, 2)  # halves of a panel, columns, numbers of a pair
    scales = pairs.abs().amax((1, 4)).float() / MOST  # [panels, 2, 16]
    scales.clamp_min_(torch.finfo(torch.float32).tiny)  # a column of zeros
    for panel, scale, numbers in zip(pairs, scales, to.view(count, depth // 2, c.PANEL // 2, 2, 2), strict=True):
        numbers.copy_((panel.float() / scale.unsqueeze(-1)).round().transpose(1, 2))
    return scales.flatten()


def num_panels(columns: int) -> int:
    return -(-columns // c.PANEL)
