"""The memory of a packed model: weights in panels of 32 columns (`csrc/panel.h`), in bf16, float32 or int8, and all
other tensors. Tensors of a checkpoint are written to it, and read from it, one at a time.

int8 is symmetric with one scale per column, which is multiplied with the column's sum at the end. One scale for every
128 numbers of a column would halve the error (docs/log.md), but would have to be applied inside the sum.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from motet.engines.native import compiled_kernels as c
from motet.engines.native.cpu.memory import huge_pages, release_pages

DTYPE_CODES = {torch.bfloat16: c.BF16, torch.float32: c.FLOAT32}
"""The kernels' code for each dtype in which they compute."""
MAX_INT8 = 127
"""The greatest int8. -128 is not used, so that a column and its negative have the same error."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Columns:
    """The columns of one weight in a fused product of several weights."""

    begin: int
    """Number of columns before the weight's first column."""
    side: int | None = None
    """Index of the weight, 0 or 1, if 16 columns of two weights alternate. None if weights are concatenated."""

    @property
    def first(self) -> int:
        """Index of the weight's first half panel (16 columns)."""
        return self.begin // (c.PANEL // 2) if self.side is None else self.side

    @property
    def every(self) -> int:
        """Distance between two half panels of the weight, in half panels."""
        return 1 if self.side is None else 2


@dataclass(frozen=True, eq=False)
class Panels:
    """A packed weight, or several weights packed for a fused product."""

    numbers: Tensor
    """[panels, depth, 32] bf16, float32 or int8, in the order of `csrc/panel.h`."""
    scales: Tensor | None
    """Scale of each column, [panels * 32] float32; None without int8."""

    def part(self, index: int, count: int) -> "Panels":
        """Returns part number `index` of `count` equal parts, a view."""
        size = len(self.numbers) // count
        scales = None if self.scales is None else self.scales.view(count, -1)[index]
        return Panels(self.numbers[index * size : (index + 1) * size], scales)

    def moved(self, of: dict[int, Tensor]) -> "Panels":
        """Returns panels whose tensors are those in `of`, by the id of the original tensor."""
        return Panels(of[id(self.numbers)], None if self.scales is None else of[id(self.scales)])


class Packer:
    """Packs weights into panels of `dtype` in one arena. `shapes`: the [columns, depth] of all weights to pack."""

    def __init__(self, kernels: ctypes.CDLL, shapes: Iterable[tuple[int, int]], *, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._dtype = dtype
        sizes = [num_panels(columns) * c.PANEL * depth * self._dtype.itemsize for columns, depth in shapes]
        self.arena = Arena(sum(sizes), len(sizes))

    def unwritten(self, columns: int, depth: int) -> Panels:
        """Returns panels of zeros. A part of them can be written at a time, so that little other memory is needed."""
        numbers = self.arena.take((num_panels(columns), depth, c.PANEL), self._dtype)
        return Panels(numbers, torch.zeros(len(numbers) * c.PANEL) if self._dtype == torch.int8 else None)

    def pack(self, weight: Tensor, interleaved: Tensor | None = None) -> Panels:
        """Packs a weight; with `interleaved`, 16 columns of `weight` alternate with the same 16 columns of
        `interleaved`. Weights have the dtype of the panels, or are bf16 if the panels are int8."""
        columns, depth = weight.shape
        shape = (num_panels(columns if interleaved is None else 2 * columns), depth, c.PANEL)
        numbers = self.arena.take(shape, self._dtype)
        int8 = self._dtype == torch.int8
        panels = torch.zeros(shape, dtype=torch.bfloat16) if int8 else numbers
        if interleaved is None:
            pack_into(panels, weight, kernels=self._kernels)
        else:
            pack_into(panels, weight, every=2, kernels=self._kernels)
            pack_into(panels, interleaved, first=1, every=2, kernels=self._kernels)
        return Panels(numbers, quantize(panels, numbers) if int8 else None)


def pack_into(panels: Tensor, weight: Tensor, *, first: int = 0, every: int = 1, kernels: ctypes.CDLL) -> None:
    """Writes a weight [columns, depth] into panels of the same dtype. The first 16 columns become half panel number
    `first`, and each further 16 columns the half panel `every` later."""
    weight = weight.contiguous()
    kernels.motet_pack(DTYPE_CODES[panels.dtype], panels.data_ptr(), weight.data_ptr(), first, every, *weight.shape)


def quantize(panels: Tensor, to: Tensor) -> Tensor:
    """Quantizes panels of bf16 into the int8 panels `to`. Returns the scale of each column, [panels * 32] float32."""
    count, depth, _ = panels.shape
    pairs = panels.view(count, depth // 2, 2, c.PANEL // 2, 2)  # half panel, column, number of a pair
    scales = pairs.abs().amax((1, 4)).float() / MAX_INT8  # [panels, 2, 16]
    scales.clamp_min_(torch.finfo(torch.float32).tiny)  # a column of zeros
    for panel, scale, numbers in zip(pairs, scales, to.view(count, depth // 2, c.PANEL // 2, 2, 2), strict=True):
        numbers.copy_((panel.float() / scale.unsqueeze(-1)).round().transpose(1, 2))
    return scales.flatten()


def by_half(numbers: Tensor) -> Tensor:
    """Returns a view [panels, halves, slices, 16 columns, numbers of a column in a slice] (`csrc/panel.h`)."""
    count, depth, _ = numbers.shape
    if numbers.dtype == torch.int8:
        return numbers.view(count, depth // 2, c.PANEL // 2, 2, 2).permute(0, 3, 1, 2, 4)
    deep = 4 // numbers.dtype.itemsize
    return numbers.view(count, depth // deep, 2, c.PANEL // 2, deep).permute(0, 2, 1, 3, 4)


def num_panels(columns: int) -> int:
    return -(-columns // c.PANEL)


class Arena:
    """Provides tensors in one contiguous allocation (`huge_pages`), which is freed with the last of these tensors."""

    def __init__(self, num_bytes: int, num_parts: int) -> None:
        """Allocates memory for `num_parts` tensors with a total of `num_bytes`."""
        self.memory = huge_pages(num_bytes + num_parts * _ALIGNMENT)
        self._used = 0

    @classmethod
    def like(cls, other: "Arena", *, empty: bool) -> "Arena":
        """Returns a new arena of the same size, with a copy of the content, or with zeros if `empty`."""
        arena = cls(len(other.memory), 0)
        if not empty:
            arena.memory.copy_(other.memory)
        return arena

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the next unused part of the memory as a tensor of zeros, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        part = self.memory[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype).view(shape)

    def moved(self, tensor: Tensor, to: Tensor) -> Tensor:
        """Returns what corresponds to `tensor` in `to`, a copy of the memory; a clone if it is not in the arena."""
        begin = tensor.data_ptr() - self.memory.data_ptr()
        if not 0 <= begin < len(self.memory):
            return tensor.clone()
        return to[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass(eq=False)
class PackedMemory:
    """All memory that a packed model's structs point to, except the KV cache. It is freed with this object."""

    arena: Arena
    """Weights of products."""
    kept: list[Tensor] = field(default_factory=list)
    """All tensors to which the structs have addresses."""
    products: list[Panels] = field(default_factory=list)
    """The weights of products; their tensors are also in `kept`."""
    rows: list[int] = field(default_factory=list)
    """Indices in `kept` of embeddings."""

    def copied(self, *, empty: bool) -> tuple["PackedMemory", dict[int, int]]:
        """Returns a copy, and the address of each copied tensor by the address of its original. With `empty`, the
        panels are zeros instead of copies."""
        arena = Arena.like(self.arena, empty=empty)
        kept = [self.arena.moved(tensor, arena.memory) for tensor in self.kept]
        of = {id(old): new for old, new in zip(self.kept, kept, strict=True)}
        addresses = {old.data_ptr(): new.data_ptr() for old, new in zip(self.kept, kept, strict=True)}
        return PackedMemory(arena, kept, [panels.moved(of) for panels in self.products], self.rows), addresses

    def release_pages(self) -> None:
        """Returns the pages of all large weights to the operating system; the weights must be written again. RoPE
        tables and norms are kept, because they are small and RoPE tables are not part of a checkpoint."""
        release_pages(self.arena.memory)
        for index in self.rows:
            release_pages(self.kept[index])


Write = Callable[[PackedMemory, Tensor], None]
"""Writes a tensor of the checkpoint, in the engine's dtype, to the memory of a packed model."""
Read = Callable[[PackedMemory], list[Tensor]]
"""Returns what a packed model has for a tensor of the checkpoint: the tensor, or what the kernels use instead."""


@dataclass(frozen=True, eq=False)
class PackedPiece:
    """Rows of a checkpoint's tensor that are adjacent columns of a fused product."""

    rows: slice | Tensor
    columns: Columns
    count: int


@dataclass(frozen=True)
class LinearPlace:
    """The place of a linear layer in the products of a packed model."""

    product: int
    """Number of the product, from 1 on."""
    pieces: Sequence[PackedPiece]


@dataclass(frozen=True)
class TensorLocation:
    """The location of one tensor of the checkpoint in a packed model."""

    shape: tuple[int, ...]
    write: Write
    read: Read
    dtype: torch.dtype
    """Dtype to which the model's own loader converts the tensor."""
    place: LinearPlace | None = None
    """Place of the weight of a product; None for other tensors."""


class WritePiece(Protocol):
    """Writes rows of a tensor to adjacent columns of a product."""

    def __call__(self, memory: PackedMemory, rows: Tensor, /, *, columns: Columns) -> None: ...


class ReadPiece(Protocol):
    """Returns the columns of a product that contain `count` rows of a tensor."""

    def __call__(self, memory: PackedMemory, columns: Columns, *, count: int) -> list[Tensor]: ...


def write_pieces(memory: PackedMemory, tensor: Tensor, *, write: WritePiece, pieces: Sequence[PackedPiece]) -> None:
    """Writes the weight or bias of a product."""
    for piece in pieces:
        write(memory, tensor[piece.rows], columns=piece.columns)


def read_pieces(memory: PackedMemory, *, read: ReadPiece, pieces: Sequence[PackedPiece]) -> list[Tensor]:
    """Returns a weight or bias as the product contains it, in the order of the checkpoint."""
    found = [read(memory, piece.columns, count=piece.count) for piece in pieces]
    total = sum(piece.count for piece in pieces)
    results = [torch.empty((total, *one.shape[1:]), dtype=one.dtype) for one in found[0]]
    for piece, tensors in zip(pieces, found, strict=True):
        for result, tensor in zip(results, tensors, strict=True):
            result[piece.rows] = tensor
    return results


def write_columns(
    memory: PackedMemory, weight: Tensor, *, columns: Columns, kernels: ctypes.CDLL, product: int
) -> None:
    """Packs a weight into its columns of a fused product."""
    write_weight(memory.products[product], weight, kernels=kernels, columns=columns)


def write_weight(fused: Panels, weight: Tensor, *, kernels: ctypes.CDLL, columns: Columns) -> None:
    lanes = c.PANEL // 2
    if fused.scales is None:
        pack_into(fused.numbers, weight, first=columns.first, every=columns.every, kernels=kernels)
        return
    panels = torch.zeros((num_panels(columns.every * len(weight)), weight.shape[1], c.PANEL), dtype=weight.dtype)
    pack_into(panels, weight, first=columns.side or 0, every=columns.every, kernels=kernels)
    numbers = torch.empty_like(panels, dtype=torch.int8)
    scales = quantize(panels, numbers)
    first = columns.begin // c.PANEL
    in_product = slice(first, first + len(panels))
    sides = slice(None) if columns.side is None else slice(columns.side, columns.side + 1)
    by_half(fused.numbers)[in_product, sides] = by_half(numbers)[:, sides]
    fused.scales.view(-1, 2, lanes)[in_product, sides] = scales.view(-1, 2, lanes)[:, sides]


def read_columns(memory: PackedMemory, columns: Columns, *, count: int, product: int) -> list[Tensor]:
    """Returns the columns of a weight in a fused product, [columns, depth]; for int8 also their scales [columns]."""
    return read_weight(memory.products[product], columns=columns, count=count)


def read_weight(fused: Panels, *, columns: Columns, count: int) -> list[Tensor]:
    in_product = slice(columns.first, columns.first + columns.every * -(-count // (c.PANEL // 2)), columns.every)
    halves = by_half(fused.numbers)
    picked = halves.flatten(0, 1)[in_product] if columns.side is None else halves[:, columns.side]
    numbers = picked.transpose(1, 2).reshape(-1, fused.numbers.shape[1])[:count]
    if fused.scales is None:
        return [numbers]
    return [numbers, fused.scales.view(-1, c.PANEL // 2)[in_product].flatten()[:count]]


def write_bias(memory: PackedMemory, bias: Tensor, *, columns: Columns, kept: int) -> None:
    fused, lanes = memory.kept[kept], c.PANEL // 2
    if columns.side is None:
        fused.view(-1)[columns.begin : columns.begin + len(bias)] = bias
    else:
        fused.view(-1, 2, lanes)[:, columns.side] = bias.view(-1, lanes)


def read_bias(memory: PackedMemory, columns: Columns, *, count: int, kept: int) -> list[Tensor]:
    """Returns the bias of a weight, [columns] float32."""
    fused = memory.kept[kept]
    if columns.side is None:
        return [fused.view(-1)[columns.begin : columns.begin + count]]
    return [fused.view(-1, 2, c.PANEL // 2)[:, columns.side].flatten()]


def write_numbers(memory: PackedMemory, weight: Tensor, *, kept: int, offset: float = 0.0) -> None:
    """Writes embeddings, or the factors of a norm, which are its weight plus `offset`."""
    numbers = memory.kept[kept]
    numbers.copy_(weight.to(numbers.dtype) + offset)


def read_numbers(memory: PackedMemory, *, kept: int) -> list[Tensor]:
    """Returns embeddings, or the factors of a norm."""
    return [memory.kept[kept]]
