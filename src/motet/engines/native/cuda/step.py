"""One step on the device: views of the array of integers, and what every layer is handed.

operators   store keys and values, attend, merge: Triton's kernels, or in tests plain torch on the CPU
scratch     the parts of rows that are read in several spans, and which rows are not finite
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from motet.engines.native.attention.group import Scores
from motet.engines.native.cuda.layout import Sizes
from motet.engines.native.cuda.work import Geometry, Item
from motet.engines.native.kv.storage import KVStorage


@dataclass(frozen=True)
class Scratch:
    """Memory that layers write and read again; nothing of it outlives a step but `sick`."""

    parts: torch.Tensor
    """[parts, heads, head_dim] float32"""
    lse: torch.Tensor
    """[parts, heads] float32: log-sum-exps of the parts, base 2"""
    sick: torch.Tensor
    """[rows] int32: 1 for rows that reached the last layer as NaN or infinity"""

    @classmethod
    def empty(cls, rows: int, parts: int, storage: KVStorage, geometry: Geometry) -> "Scratch":
        device, head_dim = storage.keys.device, storage.keys.shape[-1]
        return cls(
            torch.empty(parts, geometry.num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(parts, geometry.num_heads, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class StepTensors:
    """A step's integers, all int32 on the device; see `layout`."""

    token_ids: torch.Tensor
    """[rows]"""
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    """[logits]"""
    first_part: torch.Tensor
    """[rows + 1]"""
    narrow: torch.Tensor
    """[items, ITEM_INTS]"""
    wide: torch.Tensor
    whole: torch.Tensor
    tables: torch.Tensor
    """[block ids]"""

    @classmethod
    def over(cls, memory: torch.Tensor, sizes: Sizes) -> "StepTensors":
        """Views of `memory` [at least sizes.ints] int32."""
        at = sizes.sections()

        def view(where: range) -> torch.Tensor:
            return memory[where.start : where.stop]

        def items(where: range) -> torch.Tensor:
            return view(where).view(-1, len(Item._fields))

        return cls(
            token_ids=view(at.token_ids),
            positions=view(at.positions),
            slots=view(at.slots),
            logit_rows=view(at.logit_rows),
            first_part=view(at.first_part),
            narrow=items(at.narrow),
            wide=items(at.wide),
            whole=items(at.whole),
            tables=view(at.tables),
        )


class Activation(Enum):
    """Of a gated MLP, by Hugging Face's names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Turns:
    """By how much each row's queries and keys are turned (RoPE), both halves of a head."""

    cosines: torch.Tensor
    """[rows, head_dim]"""
    sines: torch.Tensor


@dataclass(frozen=True)
class Norms:
    """Of every query and key head, before they are turned."""

    query: torch.Tensor
    """[head_dim] float32"""
    key: torch.Tensor
    epsilon: float


class Operators(Protocol):
    """What a layer does besides products of matrices."""

    def turn(
        self, layer: int, projected: torch.Tensor, turns: Turns, norms: Norms | None, step: "Step"
    ) -> torch.Tensor:
        """Queries [rows, heads, head_dim], normed and turned, of the projections [rows, (heads + 2 * kv_heads) *
        head_dim]; keeps the step's keys, normed and turned, and values at its slots. With the last layer, marks rows
        that are not finite."""
        ...

    def attend(self, layer: int, query: torch.Tensor, step: "Step", scores: Scores) -> torch.Tensor:
        """[rows, heads, head_dim] of query [rows, heads, head_dim]."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Root mean square norm of x [.., width] with `weight` [width] float32."""
        ...

    def gate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up [rows, width] of x [rows, 2 * width], gate first."""
        ...


@dataclass(frozen=True)
class Step:
    """What the model's layers are handed; see `layers.Attention`."""

    tensors: StepTensors
    scratch: Scratch
    storage: KVStorage
    geometry: Geometry
    operators: Operators
