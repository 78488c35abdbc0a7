"""Launches the kernels of `kernels` for all that a layer does beside matrix products: it chooses the shape of tiles for
each head dimension, and passes the inputs."""

from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.cuda.work import ITEM_INTS, Geometry, Sections, places
from motet.engines.native.kv.storage import KVStorage

PARTS_AT_ONCE = 16
"""Parts of a row that are merged at a time."""
COLUMNS_AT_ONCE = 1024
NORM_OF_4_WARPS = 2048
"""Rows with up to this many columns are normed by 4 warps, wider ones by 8."""

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [rows, head_dim] of the angles by which each row's queries and keys are turned (RoPE), both halves
of a head."""


class Activation(Enum):
    """The activations of gated MLPs that we know, by Hugging Face's names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Norms:
    """The norms of query and key heads, which are applied before RoPE."""

    query: torch.Tensor
    """[head_dim] float32"""
    key: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class StepScratch:
    """Memory that layers write and read again: the parts of rows that are read in several spans, and the rows that are
    not finite. Only `non_finite` is read after the step."""

    parts: torch.Tensor
    """[parts, heads, head_dim] float32"""
    lse: torch.Tensor
    """[parts, heads] float32: log-sum-exps of the parts, base 2"""
    non_finite: torch.Tensor
    """[rows] int32: 1 for rows that reached the last layer as NaN or infinity"""

    @classmethod
    def empty(cls, rows: int, parts: int, *, storage: KVStorage, geometry: Geometry) -> "StepScratch":
        device, head_dim = storage.keys.device, storage.keys.shape[-1]
        return cls(
            torch.empty(parts, geometry.num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(parts, geometry.num_heads, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class CudaStep:
    """One step on the device, as the model's layers get it."""

    ints: Sections[torch.Tensor]
    scratch: StepScratch
    storage: KVStorage
    geometry: Geometry


def views(memory: torch.Tensor, lengths: Sections[int]) -> Sections[torch.Tensor]:
    """Returns the sections of `memory` int32 on the device; items are [items, ITEM_INTS]."""
    flat = Sections(*(memory[where] for where in places(lengths)))
    narrow, wide, whole = (items.view(-1, ITEM_INTS) for items in (flat.narrow, flat.wide, flat.whole))
    return flat._replace(narrow=narrow, wide=wide, whole=whole)


def tile_shape(rows: int, head_dim: int, *, dtype: torch.dtype) -> dict[str, int]:
    """Returns the number of keys that a tile of `rows` query rows x heads takes at a time, and the threads and buffers
    it has for them. Buffers of keys and values must fit the 227 KB of shared memory that a multiprocessor of an H100
    gives a program; `tests` compile every shape and hold it to that."""
    wide_head = head_dim > 128
    if dtype is torch.float32:  # sums on the ordinary units: exact, slow, and few keys at a time fit the registers
        return {"BLOCK_N": 16 if wide_head else 32, "num_warps": 4, "num_stages": 1}
    keys = 32 if wide_head else 64
    if rows <= 16:
        return {"BLOCK_N": keys, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": keys, "num_warps": 8 if wide_head else 4, "num_stages": 2}


class Operators:
    """Triton's kernels, which are loaded when the first `Operators` is made."""

    def __init__(self) -> None:
        from motet.engines.native.cuda import kernels  # only here: Triton comes with torch's CUDA build alone

        self._kernels = kernels

    def turn(
        self, layer: int, projected: torch.Tensor, *, turns: Turns, norms: Norms | None, step: CudaStep
    ) -> torch.Tensor:
        """Returns queries [rows, heads, head_dim], normed and turned, of the projections [rows, (heads + 2 * kv_heads)
        * head_dim]; stores the step's keys, normed and turned, and values at its slots. With the last layer, marks rows
        that are not finite."""
        storage, heads = step.storage, step.geometry.num_heads
        keys, values = storage.keys[layer], storage.values[layer]
        _, num_kv_heads, head_dim = keys.shape
        rows = len(projected)
        query = torch.empty(rows, heads, head_dim, dtype=projected.dtype, device=projected.device)
        self._kernels.turn_rows[(rows, heads + num_kv_heads)](
            projected,
            *turns,
            norms.query if norms else turns[0],
            norms.key if norms else turns[0],
            query,
            keys,
            values,
            step.ints.slots,
            step.scratch.non_finite,
            norms.epsilon if norms else 0.0,
            storage.key_limit,
            torch.finfo(values.dtype).max,
            heads,
            num_kv_heads,
            keys.stride(0),
            HEAD_DIM=head_dim,
            BLOCK_D=padded_head_dim(head_dim),
            NORMED=norms is not None,
            LAST=layer == storage.num_layers - 1,
            num_warps=1,
        )
        return query

    def attend(self, layer: int, query: torch.Tensor, *, step: CudaStep, scores: Scores) -> torch.Tensor:
        """Returns [rows, heads, head_dim] for the query [rows, heads, head_dim]. Whole tiles come after the merge: they
        have no parts, and the merge zeroes rows without parts."""
        ints, scratch, geometry = step.ints, step.scratch, step.geometry
        rows, heads, head_dim = query.shape
        output = torch.empty(rows, heads, head_dim, dtype=query.dtype, device=query.device)
        tiles = partial(self._attend_tiles, layer, query, step=step, scores=scores)
        tiles(items=ints.narrow, block_m=geometry.narrow, output=scratch.parts, final=False)
        tiles(items=ints.wide, block_m=geometry.wide, output=scratch.parts, final=False)
        self._kernels.merge_parts[(rows, heads)](
            scratch.parts,
            scratch.lse,
            ints.first_part,
            output,
            heads,
            HEAD_DIM=head_dim,
            BLOCK_D=padded_head_dim(head_dim),
            BLOCK_P=PARTS_AT_ONCE,
            num_warps=4,
        )
        tiles(items=ints.whole, block_m=geometry.wide, output=output, final=True)
        return output

    def _attend_tiles(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        step: CudaStep,
        scores: Scores,
        items: torch.Tensor,
        block_m: int,
        output: torch.Tensor,
        final: bool,
    ) -> None:
        """Launches the kernel once, if there is anything to do."""
        if not len(items):
            return
        storage = step.storage
        keys, values = storage.keys[layer], storage.values[layer]
        head_dim = query.shape[-1]
        self._kernels.attend_tiles[(len(items), keys.shape[1])](
            query,
            keys,
            values,
            output,
            step.scratch.lse,
            items,
            step.ints.tables,
            step.ints.positions,
            step.ints.first_part,
            scores.scale,
            scores.window or 0,
            scores.softcap or 1.0,
            keys.stride(0),
            query.shape[1],
            HEAD_DIM=head_dim,
            HEADS_PER_KV_HEAD=step.geometry.heads_per_kv_head,
            BLOCK_SIZE=storage.block_size,
            BLOCK_M=block_m,
            BLOCK_D=padded_head_dim(head_dim),
            WINDOWED=scores.window is not None,
            CAPPED=scores.softcap is not None,
            FINAL=final,
            **tile_shape(block_m, head_dim, dtype=keys.dtype),
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
        """Returns the root mean square norm of x [.., width] with `weight` [width] float32."""
        output, width = torch.empty_like(x), x.shape[-1]
        block = 1 << (width - 1).bit_length()
        warps = 8 if block > NORM_OF_4_WARPS else 4
        self._kernels.norm_rows[(x.numel() // width,)](x, weight, output, width, epsilon, BLOCK=block, num_warps=warps)
        return output

    def gate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Returns activation(gate) * up [rows, width] of x [rows, 2 * width], gate first."""
        rows, width = x.shape[0], x.shape[1] // 2
        output = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        gelu = activation is Activation.GELU_TANH
        self._kernels.gate_rows[(rows, -(-width // COLUMNS_AT_ONCE))](
            x, output, width, GELU=gelu, BLOCK=COLUMNS_AT_ONCE, num_warps=4
        )
        return output


def padded_head_dim(head_dim: int) -> int:
    """Returns the least power of two that holds a head and that a matrix unit can use."""
    return max(16, 1 << (head_dim - 1).bit_length())
