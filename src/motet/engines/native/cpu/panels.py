"""The memory of a packed model: weights in panels of 32 columns (`csrc/panel.h`), in bf16, float32 or int8, and the
rest of its numbers. Tensors of a checkpoint are written into it, and read back from it, one by one.

int8 is symmetric with one scale for each column, which multiplies the column's sum at the end. Scales for groups of 128
of a column's numbers would halve the error (docs/log.md), but would have to be applied inside the sum.
"""

import ctypes
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from motet.engines.native import compiled_kernels as c
from motet.engines.native.memory import huge_pages, release_pages

NUMBERS = {torch.bfloat16: c.BF16, torch.float32: c.FLOAT32}
"""The kernels' number for each dtype that they compute in."""
MOST = 127
"""The greatest int8; -128 is not used, so that a column and its negative have the same error."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Columns:
    """The columns of one weight in a product of several."""

    begin: int
    """Number of columns before it."""
    side: int | None = None
    """0 or 1 if the product has 16 columns of one weight and 16 of another in turns: which of the two it is."""

    @property
    def first(self) -> int:
        """The number of its first half of a panel."""
        return self.begin // (c.PANEL // 2) if self.side is None else self.side

    @property
    def every(self) -> int:
        """Its halves of panels lie at this distance."""
        return 1 if self.side is None else 2


@dataclass(frozen=True, eq=False)
class Panels:
    numbers: torch.Tensor
    """[panels, depth, 32] bf16, float32 or int8, in the order of `csrc/panel.h`."""
    scales: torch.Tensor | None
    """[panels * 32] float32; None without int8."""

    def moved(self, of: dict[int, torch.Tensor]) -> "Panels":
        """Returns these panels in a copy, where each tensor is the one `of` its id."""
        return Panels(of[id(self.numbers)], None if self.scales is None else of[id(self.scales)])


class Packer:
    """Puts weights of known shapes [columns, depth] into panels of `dtype` that lie side by side in memory."""

    def __init__(self, kernels: ctypes.CDLL, shapes: Iterable[tuple[int, int]], *, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._dtype = dtype
        sizes = [num_panels(columns) * c.PANEL * depth * self._dtype.itemsize for columns, depth in shapes]
        self.arena = Arena(sum(sizes), len(sizes))

    def pack(self, weight: torch.Tensor, beside: torch.Tensor | None = None) -> Panels:
        """Packs a weight, or 16 columns of it and the same 16 of the one `beside` it, in turns. Weights have the dtype
        of the panels, or are bf16 if that is int8."""
        columns, depth = weight.shape
        shape = (num_panels(columns if beside is None else 2 * columns), depth, c.PANEL)
        numbers = self.arena.take(shape, self._dtype)
        int8 = self._dtype == torch.int8
        panels = torch.zeros(shape, dtype=torch.bfloat16) if int8 else numbers
        if beside is None:
            pack_into(panels, weight, kernels=self._kernels)
        else:
            pack_into(panels, weight, every=2, kernels=self._kernels)
            pack_into(panels, beside, first=1, every=2, kernels=self._kernels)
        return Panels(numbers, quantize(panels, numbers) if int8 else None)


def pack_into(
    panels: torch.Tensor, weight: torch.Tensor, *, first: int = 0, every: int = 1, kernels: ctypes.CDLL
) -> None:
    """Writes a weight [columns, depth] over columns of panels of the same dtype: 16 columns become half number `first`
    of a panel, the next 16 are `every` halves further on, and so on."""
    weight = weight.contiguous()
    number = NUMBERS[panels.dtype]
    kernels.motet_pack(number, panels.data_ptr(), weight.data_ptr(), first, every, *weight.shape)


def quantize(panels: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Writes panels of bf16 `to` panels of int8; returns the scale of each column, [panels * 32]."""
    count, depth, _ = panels.shape
    pairs = panels.view(count, depth // 2, 2, c.PANEL // 2, 2)  # halves of a panel, columns, numbers of a pair
    scales = pairs.abs().amax((1, 4)).float() / MOST  # [panels, 2, 16]
    scales.clamp_min_(torch.finfo(torch.float32).tiny)  # a column of zeros
    for panel, scale, numbers in zip(pairs, scales, to.view(count, depth // 2, c.PANEL // 2, 2, 2), strict=True):
        numbers.copy_((panel.float() / scale.unsqueeze(-1)).round().transpose(1, 2))
    return scales.flatten()


def by_half(numbers: torch.Tensor) -> torch.Tensor:
    """Returns panels as [panels, halves of 16 columns, slices, 16, numbers of a column in a slice], in the same memory
    (`csrc/panel.h`)."""
    count, depth, _ = numbers.shape
    if numbers.dtype == torch.int8:
        return numbers.view(count, depth // 2, c.PANEL // 2, 2, 2).permute(0, 3, 1, 2, 4)
    deep = 4 // numbers.dtype.itemsize
    return numbers.view(count, depth // deep, 2, c.PANEL // 2, deep).permute(0, 2, 1, 3, 4)


def num_panels(columns: int) -> int:
    return -(-columns // c.PANEL)


class Arena:
    """Hands out parts of one run of memory; all of it is freed with the last tensor in it.

    It is allocated once, in huge pages if the system has them: a step reads all of it, and would otherwise miss the
    processor's table of pages every few kilobytes.
    """

    def __init__(self, num_bytes: int, num_parts: int) -> None:
        """Makes room for `num_parts` parts of `num_bytes` in all."""
        self.memory = huge_pages(num_bytes + num_parts * _ALIGNMENT)
        self._used = 0

    @classmethod
    def like(cls, other: "Arena", *, empty: bool) -> "Arena":
        """Returns an arena of the same size in memory of its own, with the same content or with zeros."""
        arena = cls(len(other.memory), 0)
        if not empty:
            arena.memory.copy_(other.memory)
        return arena

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        part = self.memory[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype).view(shape)

    def moved(self, tensor: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Returns the part of `to`, a copy of the arena's memory, where `tensor` lies here; a clone if it lies
        elsewhere."""
        begin = tensor.data_ptr() - self.memory.data_ptr()
        if not 0 <= begin < len(self.memory):
            return tensor.clone()
        return to[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass(eq=False)
class PackedMemory:
    """All that a packed model's structs point to, besides the KV cache."""

    arena: Arena
    kept: list[torch.Tensor] = field(default_factory=list)
    products: list[Panels] = field(default_factory=list)
    """Those of `kept` that are weights of products."""
    rows: list[int] = field(default_factory=list)
    """Numbers of those of `kept` that are embeddings."""

    def copied(self, *, empty: bool) -> tuple["PackedMemory", dict[int, int]]:
        """Returns a copy, and the address there of each tensor by its address here. `empty`: its panels are zeros."""
        arena = Arena.like(self.arena, empty=empty)
        kept = [self.arena.moved(tensor, arena.memory) for tensor in self.kept]
        of = {id(old): new for old, new in zip(self.kept, kept, strict=True)}
        addresses = {old.data_ptr(): new.data_ptr() for old, new in zip(self.kept, kept, strict=True)}
        return PackedMemory(arena, kept, [panels.moved(of) for panels in self.products], self.rows), addresses

    def forget(self) -> None:
        """Gives all large weights back to the system until they are next written. Angles and norms stay: together they
        are small, and angles are in no checkpoint."""
        release_pages(self.arena.memory)
        for number in self.rows:
            release_pages(self.kept[number])


Write = Callable[[PackedMemory, torch.Tensor], None]
"""Writes a tensor of the checkpoint, in the engine's dtype, into the memory of a packed model."""
Read = Callable[[PackedMemory], list[torch.Tensor]]
"""Returns the numbers that have become of a tensor: it itself, or what the kernels need of it."""


@dataclass(frozen=True)
class TensorLocation:
    """Where one tensor of the checkpoint lies in a packed model."""

    shape: tuple[int, ...]
    write: Write
    read: Read


def write_columns(
    memory: PackedMemory, weight: torch.Tensor, *, kernels: ctypes.CDLL, product: int, columns: Columns
) -> None:
    """Packs a weight over its columns of a product."""
    whole, lanes = memory.products[product], c.PANEL // 2
    if whole.scales is None:
        pack_into(whole.numbers, weight, first=columns.first, every=columns.every, kernels=kernels)
        return
    panels = torch.zeros((num_panels(columns.every * len(weight)), weight.shape[1], c.PANEL), dtype=weight.dtype)
    pack_into(panels, weight, first=columns.side or 0, every=columns.every, kernels=kernels)
    numbers = torch.empty_like(panels, dtype=torch.int8)
    scales = quantize(panels, numbers)
    first = columns.begin // c.PANEL
    here = slice(first, first + len(panels))
    sides = slice(None) if columns.side is None else slice(columns.side, columns.side + 1)
    by_half(whole.numbers)[here, sides] = by_half(numbers)[:, sides]
    whole.scales.view(-1, 2, lanes)[here, sides] = scales.view(-1, 2, lanes)[:, sides]


def read_columns(memory: PackedMemory, *, product: int, columns: Columns, count: int) -> list[torch.Tensor]:
    """Returns the columns of a weight in a product, [columns, depth], and the scales of int8."""
    whole = memory.products[product]
    here = slice(columns.first, columns.first + columns.every * -(-count // (c.PANEL // 2)), columns.every)
    halves = by_half(whole.numbers)
    picked = halves.flatten(0, 1)[here] if columns.side is None else halves[:, columns.side]
    numbers = picked.transpose(1, 2).reshape(-1, whole.numbers.shape[1])[:count]
    return [numbers] if whole.scales is None else [numbers, whole.scales.view(-1, c.PANEL // 2)[here].flatten()[:count]]


def write_bias(memory: PackedMemory, bias: torch.Tensor, *, kept: int, columns: Columns) -> None:
    """Writes a bias over its part of that of a product."""
    whole, lanes = memory.kept[kept], c.PANEL // 2
    if columns.side is None:
        whole.view(-1)[columns.begin : columns.begin + len(bias)] = bias
    else:
        whole.view(-1, 2, lanes)[:, columns.side] = bias.view(-1, lanes)


def read_bias(memory: PackedMemory, *, kept: int, columns: Columns, count: int) -> list[torch.Tensor]:
    whole, lanes = memory.kept[kept], c.PANEL // 2
    if columns.side is None:
        return [whole.view(-1)[columns.begin : columns.begin + count]]
    return [whole.view(-1, 2, lanes)[:, columns.side].flatten()]


def write_numbers(memory: PackedMemory, weight: torch.Tensor, *, kept: int, more: float = 0.0) -> None:
    """Writes embeddings, or the factors of a norm, which are `more` than its weight."""
    numbers = memory.kept[kept]
    numbers.copy_(weight.to(numbers.dtype) + more)


def read_numbers(memory: PackedMemory, *, kept: int) -> list[torch.Tensor]:
    return [memory.kept[kept]]
