"""Launches the kernels of `kernels` for all operations of a layer except matrix products. Selects the tile shape for
each head dimension, and passes the inputs."""

from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.cuda.work import ITEM_INTS, Geometry, Sections, places
from motet.engines.native.kv.storage import KVStorage

PARTS_AT_ONCE = 16
"""Number of parts of a row that are merged at a time."""
COLUMNS_AT_ONCE = 1024
"""Number of columns of a gated MLP per program."""
NORM_OF_4_WARPS = 2048
"""Maximum number of columns for which a norm uses 4 warps; wider rows use 8."""

CosSin = tuple[Tensor, Tensor]
"""Cosines and sines of RoPE for each row, each [rows, head_dim], with both halves of a head."""


class Activation(Enum):
    """Activations of gated MLPs for which there is a kernel, by their names in Hugging Face's configs."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Norms:
    """The norms of query and key heads, applied before RoPE."""

    query: Tensor  # [head_dim] float32
    key: Tensor
    epsilon: float


@dataclass(frozen=True)
class StepScratch:
    """Memory on the device for intermediate results of the layers: the parts of rows that are read in several spans,
    and the rows that are not finite. Only `non_finite` is read after the step."""

    parts: Tensor  # [parts, heads, head_dim] float32
    lse: Tensor  # [parts, heads] float32: log-sum-exps of the parts, base 2
    non_finite: Tensor  # [rows] int32: 1 for rows with NaN or infinity in the last layer

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
    """Inputs of a step on the device, which the runner passes to the model's layers."""

    ints: Sections[Tensor]
    scratch: StepScratch
    storage: KVStorage
    geometry: Geometry


def views(memory: Tensor, lengths: Sections[int]) -> Sections[Tensor]:
    """Returns views of the sections in `memory` [n] int32 on the device. Items are [items, ITEM_INTS]."""
    flat = Sections(*(memory[where] for where in places(lengths)))
    narrow, wide, final = (items.view(-1, ITEM_INTS) for items in (flat.narrow, flat.wide, flat.final))
    return flat._replace(narrow=narrow, wide=wide, final=final)


def tile_shape(rows: int, head_dim: int, *, dtype: torch.dtype) -> dict[str, int]:
    """Returns the number of keys that a tile of `rows` query rows x heads processes at a time, and its number of warps
    and pipeline stages. The buffers of keys and values must fit into the 227 KB of shared memory of a program on an
    H100; tests compile every shape and check this."""
    wide_head = head_dim > 128
    if dtype is torch.float32:  # exact products have no matrix units, and the registers hold few keys at a time
        return {"BLOCK_N": 16 if wide_head else 32, "num_warps": 4, "num_stages": 1}
    keys = 32 if wide_head else 64
    if rows <= 16:
        return {"BLOCK_N": keys, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": keys, "num_warps": 8 if wide_head else 4, "num_stages": 2}


class Operators:
    """Launches Triton's kernels, which are loaded when the first `Operators` is made."""

    def __init__(self) -> None:
        from motet.engines.native.cuda import kernels  # Triton is installed only with torch's CUDA build

        self._kernels = kernels

    def rotate(self, layer: int, projected: Tensor, *, cos_sin: CosSin, norms: Norms | None, step: CudaStep) -> Tensor:
        """Applies norms and RoPE to the queries and keys in `projected` [rows, (heads + 2 * kv_heads) * head_dim].
        Returns the queries [rows, heads, head_dim], and stores the step's keys and values at its slots. In the last
        layer, marks the rows that are not finite."""
        storage, heads = step.storage, step.geometry.num_heads
        keys, values = storage.keys[layer], storage.values[layer]
        _, num_kv_heads, head_dim = keys.shape
        rows, last = len(projected), layer == storage.num_layers - 1
        query = torch.empty(rows, heads, head_dim, dtype=projected.dtype, device=projected.device)
        weights = (norms.query, norms.key) if norms else (cos_sin[0], cos_sin[0])
        tensors = projected, *cos_sin, *weights, query, keys, values, step.ints.slots, step.scratch.non_finite
        limits = norms.epsilon if norms else 0.0, storage.key_limit, torch.finfo(values.dtype).max
        numbers = *limits, heads, num_kv_heads, keys.stride(0)
        self._kernels.rotate_rows[(rows, heads + num_kv_heads)](
            *tensors, *numbers, **head_sizes(head_dim), NORMED=norms is not None, LAST=last, num_warps=1
        )
        return query

    def attend(self, layer: int, query: Tensor, *, step: CudaStep, scores: Scores) -> Tensor:
        """Returns the attention [rows, heads, head_dim] of `query` [rows, heads, head_dim]. Final tiles are launched
        after the merge, because the merge writes zeros to rows without parts."""
        ints, scratch, geometry = step.ints, step.scratch, step.geometry
        rows, heads, head_dim = query.shape
        output = torch.empty(rows, heads, head_dim, dtype=query.dtype, device=query.device)
        tiles = partial(self._attend_tiles, layer, query, step=step, scores=scores)
        tiles(items=ints.narrow, block_m=geometry.narrow, output=scratch.parts, final=False)
        tiles(items=ints.wide, block_m=geometry.wide, output=scratch.parts, final=False)
        arguments = scratch.parts, scratch.lse, ints.first_part, output, heads
        self._kernels.merge_parts[(rows, heads)](*arguments, **head_sizes(head_dim), BLOCK_P=PARTS_AT_ONCE, num_warps=4)
        tiles(items=ints.final, block_m=geometry.wide, output=output, final=True)
        return output

    def _attend_tiles(
        self,
        layer: int,
        query: Tensor,
        *,
        step: CudaStep,
        scores: Scores,
        items: Tensor,
        block_m: int,
        output: Tensor,
        final: bool,
    ) -> None:
        """Launches the kernel for `items`, if there are any."""
        if not len(items):
            return
        storage, ints = step.storage, step.ints
        keys, values = storage.keys[layer], storage.values[layer]
        head_dim = query.shape[-1]
        tensors = query, keys, values, output, step.scratch.lse, items, ints.tables, ints.positions, ints.first_part
        numbers = scores.scale, scores.window or 0, scores.softcap or 1.0, keys.stride(0), query.shape[1]
        self._kernels.attend_tiles[(len(items), keys.shape[1])](
            *tensors,
            *numbers,
            **head_sizes(head_dim),
            HEADS_PER_KV_HEAD=step.geometry.heads_per_kv_head,
            BLOCK_SIZE=storage.block_size,
            BLOCK_M=block_m,
            WINDOWED=scores.window is not None,
            CAPPED=scores.softcap is not None,
            FINAL=final,
            **tile_shape(block_m, head_dim, dtype=keys.dtype),
        )

    def norm(self, x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
        """Returns the root mean square norm [.., width] of x [.., width] with `weight` [width] float32."""
        output, width = torch.empty_like(x), x.shape[-1]
        block = 1 << (width - 1).bit_length()
        warps = 8 if block > NORM_OF_4_WARPS else 4
        self._kernels.norm_rows[(x.numel() // width,)](x, weight, output, width, epsilon, BLOCK=block, num_warps=warps)
        return output

    def gate(self, x: Tensor, activation: Activation) -> Tensor:
        """Returns activation(gate) * up [rows, width] of x [rows, 2 * width], gate first."""
        rows, width = x.shape[0], x.shape[1] // 2
        output = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        gelu = activation is Activation.GELU_TANH
        self._kernels.gate_rows[(rows, -(-width // COLUMNS_AT_ONCE))](
            x, output, width, GELU=gelu, BLOCK=COLUMNS_AT_ONCE, num_warps=4
        )
        return output


def head_sizes(head_dim: int) -> dict[str, int]:
    """Returns the size of a head, and the power of two to which it is padded, at least the minimum of a matrix unit."""
    return {"HEAD_DIM": head_dim, "BLOCK_D": max(16, 1 << (head_dim - 1).bit_length())}
