"""Packs adapters for the compiled kernels (`csrc/adapters.h`).

A fused product has one adapter part. Its A has the columns of all changed layers, one layer after the other, and its B
has the columns of the product. Each panel of B uses a window of the numbers of x A: the numbers of its own layer.

    q, k and v, rank 16     x A   [q 16][k 16][v 16][0 16]      panels of q: window 0 to 16, k: 16 to 32, v: 32 to 48
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from motet.engines.native import compiled_kernels as c
from motet.engines.native.adapters.linear_adapters import linears_of, unsupported_reason_of
from motet.engines.native.adapters.low_rank import AdapterRows, LowRank, Shape
from motet.engines.native.attention.attention_plan import Ints
from motet.engines.native.cpu import panels
from motet.engines.native.cpu.packed_weights import PackedModel

ALIGNMENT = 2
"""A window starts and ends at a multiple of this: the kernels multiply pairs of bf16 numbers."""


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter in panels. The structs have addresses in the tensors."""

    parts: "ctypes.Array[c.LowRankPart]"
    """The part of each product, by the product's number."""
    tensors: Sequence[Tensor]

    @property
    def address(self) -> int:
        return ctypes.addressof(self.parts)


class PackedAdapters:
    """Makes adapters for a packed model."""

    def __init__(self, model: PreTrainedModel, packed: PackedModel, *, kernels: ctypes.CDLL) -> None:
        self.linears: Mapping[str, Shape] = {
            name: (linear.out_features, linear.in_features) for name, linear in linears_of(model).items()
        }
        self.dtype = packed.dtype
        found = {name: packed.locations.get(f"{name}.weight") for name in self.linears}
        self._places = {name: one.place for name, one in found.items() if one is not None and one.place is not None}
        self._num_panels = [0, *(len(product.numbers) for product in packed.memory.products)]
        self._kernels = kernels
        self._unsupported = {
            name: why for name in self.linears if (why := unsupported_reason_of(model, name)) is not None
        }

    def unsupported_reason(self, linear: str) -> str | None:
        if (why := self._unsupported.get(linear)) is not None:
            return why
        return None if linear in self._places else "adapters of this layer need --kernels torch"

    def make(self, parts: Mapping[str, LowRank]) -> PackedAdapter:
        structs = (c.LowRankPart * len(self._num_panels))()
        tensors: list[Tensor] = []
        by_product: dict[int, dict[str, LowRank]] = {}
        for linear, part in parts.items():
            by_product.setdefault(self._places[linear].product, {})[linear] = part
        packed = {product: self._pack(product, by_product[product]) for product in sorted(by_product)}
        weights = [tensor for down, up, _ in packed.values() for tensor in (down, up)]
        arena = panels.Arena(sum(tensor.nbytes for tensor in weights), len(weights))
        for product, (*matrices, windows) in packed.items():
            own = [*(arena.take(tuple(one.shape), self.dtype).copy_(one) for one in matrices), windows]
            tensors += own
            structs[product] = c.LowRankPart(*(one.data_ptr() for one in own), len(own[0]) * c.PANEL)
        return PackedAdapter(structs, tensors)

    def _pack(self, product: int, changed: Mapping[str, LowRank]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns A, B and the windows of a product, in the layout of `csrc/model.h`."""
        begins: dict[str, int] = {}
        width = 0
        for linear, part in changed.items():
            begins[linear], width = width, -(-(width + len(part.down)) // ALIGNMENT) * ALIGNMENT
        width = panels.num_panels(width) * c.PANEL
        inputs = next(iter(changed.values())).down.shape[1]
        rows = torch.zeros(width, inputs, dtype=self.dtype)
        up = torch.zeros(self._num_panels[product], width, c.PANEL, dtype=self.dtype)
        windows = np.zeros((len(up), 3), np.int32)
        for linear, part in changed.items():
            begin, rank = begins[linear], len(part.down)
            rows[begin : begin + rank] = part.down
            for piece in self._places[linear].pieces:
                columns = torch.zeros(piece.count, width, dtype=self.dtype)
                columns[:, begin : begin + rank] = part.up[piece.rows]
                first, every = piece.columns.first, piece.columns.every
                panels.pack_into(up, columns, first=first, every=every, kernels=self._kernels)
                halves = range(first, first + every * -(-piece.count // (c.PANEL // 2)), every)
                for panel in {half // 2 for half in halves}:
                    _widen(windows[panel], begin, end=-(-(begin + rank) // ALIGNMENT) * ALIGNMENT)
        down = torch.zeros(width // c.PANEL, inputs, c.PANEL, dtype=self.dtype)
        panels.pack_into(down, rows, kernels=self._kernels)
        windows[1:, 2] = np.cumsum(windows[:-1, 1] - windows[:-1, 0])
        used = [one[begin:end] for one, (begin, end, _) in zip(up, windows.tolist(), strict=True)]
        return down, torch.cat(used), torch.from_numpy(windows)


def _widen(window: Ints, begin: int, *, end: int) -> None:
    """Widens a window so that it contains [begin, end). An empty window has the end 0."""
    window[0] = min(window[0], begin) if window[1] else begin
    window[1] = max(window[1], end)


def adapter_arrays(rows: Sequence[AdapterRows], num_rows: int) -> tuple[Ints, "ctypes.Array[ctypes.c_void_p]"]:
    """Returns the number of the adapter of each row, -1 for none, and the addresses of the adapters."""
    numbers: dict[int, int] = {}
    of_row = np.full(num_rows, -1, np.int32)
    for one in rows:
        adapter = one.adapter.weights
        assert isinstance(adapter, PackedAdapter)
        of_row[one.begin : one.end] = numbers.setdefault(adapter.address, len(numbers))
    return of_row, (ctypes.c_void_p * len(numbers))(*numbers)
