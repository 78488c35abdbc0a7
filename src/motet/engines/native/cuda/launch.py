"""Launches the kernels of `kernels`: which shapes of tile for which head dimension, and what they are handed."""

from dataclasses import dataclass

import torch

from motet.engines.native.attention.group import Scores
from motet.engines.native.cuda.kernels import attend_tiles, gate_rows, merge_parts, norm_rows, turn_rows
from motet.engines.native.cuda.step import Activation, Norms, Step, Turns
from motet.engines.native.kv.storage import KVStorage

PARTS_AT_ONCE = 16
"""Parts of a row that are merged at a time."""
COLUMNS_AT_ONCE = 1024
NORM_OF_4_WARPS = 2048
"""Columns; wider rows take 8."""


@dataclass(frozen=True)
class TileShape:
    """How a kernel takes keys, and how many threads and buffers it has for it."""

    keys: int
    num_warps: int
    num_stages: int


def tile_shape(rows: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """For a tile of `rows` query rows x heads. Buffers of keys and values must fit the 227 KB of shared memory that a
    multiprocessor of an H100 gives a program; `tests` compile every shape and hold it to that."""
    wide_head = head_dim > 128
    if dtype is torch.float32:  # sums on the ordinary units: exact, slow, and few keys at a time fit the registers
        return TileShape(keys=16 if wide_head else 32, num_warps=4, num_stages=1)
    if rows <= 16:
        return TileShape(keys=32 if wide_head else 64, num_warps=4, num_stages=3)
    return TileShape(keys=32 if wide_head else 64, num_warps=8 if wide_head else 4, num_stages=2)


class TritonOperators:
    """See `step.Operators`."""

    def turn(self, layer: int, projected: torch.Tensor, turns: Turns, norms: Norms | None, step: Step) -> torch.Tensor:
        storage, heads = step.storage, step.geometry.num_heads
        keys, values = storage.keys[layer], storage.values[layer]
        _, num_kv_heads, head_dim = keys.shape
        rows = len(projected)
        query = torch.empty(rows, heads, head_dim, dtype=projected.dtype, device=projected.device)
        turn_rows[(rows, heads + num_kv_heads)](
            projected,
            turns.cosines,
            turns.sines,
            norms.query if norms else turns.cosines,
            norms.key if norms else turns.cosines,
            query,
            keys,
            values,
            step.tensors.slots,
            step.scratch.sick,
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

    def attend(self, layer: int, query: torch.Tensor, step: Step, scores: Scores) -> torch.Tensor:
        """Rows without parts are zeroed by the merge, so whole tiles, which have none, come after it."""
        tensors, scratch, geometry = step.tensors, step.scratch, step.geometry
        rows, heads, head_dim = query.shape
        output = torch.empty(rows, heads, head_dim, dtype=query.dtype, device=query.device)
        tiles = _Tiles(layer, query, step, scores)
        tiles.attend(tensors.narrow, geometry.narrow, scratch.parts, final=False)
        tiles.attend(tensors.wide, geometry.wide, scratch.parts, final=False)
        merge_parts[(rows, heads)](
            scratch.parts,
            scratch.lse,
            tensors.first_part,
            output,
            heads,
            HEAD_DIM=head_dim,
            BLOCK_D=padded_head_dim(head_dim),
            BLOCK_P=PARTS_AT_ONCE,
            num_warps=4,
        )
        tiles.attend(tensors.whole, geometry.wide, output, final=True)
        return output

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        output, width = torch.empty_like(x), x.shape[-1]
        block = 1 << (width - 1).bit_length()
        norm_rows[(x.numel() // width,)](
            x, weight, output, width, epsilon, BLOCK=block, num_warps=8 if block > NORM_OF_4_WARPS else 4
        )
        return output

    def gate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        output = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        gelu = activation is Activation.GELU_TANH
        gate_rows[(rows, -(-width // COLUMNS_AT_ONCE))](x, output, width, GELU=gelu, BLOCK=COLUMNS_AT_ONCE, num_warps=4)
        return output


@dataclass(frozen=True)
class _Tiles:
    """What all launches of one layer have in common."""

    layer: int
    query: torch.Tensor
    step: Step
    scores: Scores

    def attend(self, items: torch.Tensor, block_m: int, output: torch.Tensor, *, final: bool) -> None:
        """One launch, if there is anything to do."""
        if not len(items):
            return
        step, scores, query = self.step, self.scores, self.query
        storage: KVStorage = step.storage
        keys, values = storage.keys[self.layer], storage.values[self.layer]
        head_dim = query.shape[-1]
        shape = tile_shape(block_m, head_dim, keys.dtype)
        attend_tiles[(len(items), keys.shape[1])](
            query,
            keys,
            values,
            output,
            step.scratch.lse,
            items,
            step.tensors.tables,
            step.tensors.positions,
            step.tensors.first_part,
            scores.scale,
            scores.window or 0,
            scores.softcap or 1.0,
            keys.stride(0),
            query.shape[1],
            HEAD_DIM=head_dim,
            SIBLINGS=step.geometry.siblings,
            BLOCK_SIZE=storage.block_size,
            BLOCK_M=block_m,
            BLOCK_N=shape.keys,
            BLOCK_D=padded_head_dim(head_dim),
            WINDOWED=scores.window is not None,
            CAPPED=scores.softcap is not None,
            FINAL=final,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


def padded_head_dim(head_dim: int) -> int:
    """The least that holds a head, and at least what a matrix unit takes."""
    return max(16, 1 << (head_dim - 1).bit_length())
