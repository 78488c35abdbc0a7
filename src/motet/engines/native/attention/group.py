"""Attention of one step over paged KV: the trunk once for all siblings, each tail on its own, merged.

The merge of two softmax parts a and b over disjoint keys, with log-sum-exps la and lb, is
    output = w * a + (1 - w) * b,   w = sigmoid(la - lb)
(the rule of FlashDecoding and of FlashInfer's cascade attention).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from motet.engines.native.attention.kernels import Kernel, kernel_for
from motet.engines.native.attention.masks import additive, prompt_mask, tail_mask, trunk_mask
from motet.engines.native.attention.plan import AttentionPlan, PromptRead, TailRead, TrunkRead
from motet.engines.native.kv.storage import KVStorage

Read = PromptRead | TrunkRead | TailRead


@dataclass(frozen=True)
class Scores:
    """How a layer weighs keys."""

    scale: float
    window: int | None = None
    """Keys a query sees, itself included; None: all before it."""
    softcap: float | None = None


class StepAttention:
    """One step's attention, called by every layer in turn. Index tensors and masks are made once and kept."""

    def __init__(self, plan: AttentionPlan, slots: torch.Tensor, storage: KVStorage) -> None:
        self._plan = plan
        self._slots = slots  # [num_tokens] int64: where each row's key and value go
        self._storage = storage
        self._device = storage.keys.device
        self.sick = torch.zeros_like(slots, dtype=torch.bool)
        """[num_tokens]: rows that reached the last layer as NaN or infinity. Once a row is, it stays so; but what is
        stored as its KV is finite, and would pass for sound."""
        self._masks: dict[tuple[Read, int | None], torch.Tensor | None] = {}
        self._where: dict[Read, slice | torch.Tensor] = {}
        for prompt in plan.prompts:
            self._where[prompt] = self._locate(prompt)
        for trunk in plan.trunks:
            self._where[trunk] = self._locate(trunk)
        for tail in plan.tails:
            self._where[tail] = self._blocks(tail.tables, tail.num_keys)
        self._row_ids = {read: self._ints(read.rows) for read in plan.tails}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, num_heads, rows, head_dim], rows padded
        key: torch.Tensor,  # [1, num_kv_heads, rows, head_dim]
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """Stores the step's keys and values, then returns the output [1, rows, num_heads, head_dim]."""
        num_tokens = self._slots.shape[0]
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [rows, num_kv_heads, head_dim]
        self._storage.write(layer, self._slots, keys[:num_tokens], values[:num_tokens])
        if layer == self._storage.num_layers - 1:
            self.sick = ~values[:num_tokens].isfinite().flatten(1).all(1)
        rows = query[0].transpose(0, 1)  # [rows, num_heads, head_dim]
        output = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        reader = _LayerReader(self, layer, kernel_for(self._device, scores.softcap), scores)
        for prompt in self._plan.prompts:
            output[prompt.begin : prompt.end] = reader.prompt(prompt, rows[prompt.begin : prompt.end])
        count = self._plan.num_tail_rows
        if count:
            output[:count] = reader.tails(self._plan, rows[:count])
        return output.unsqueeze(0)

    def mask(
        self, read: Read, window: int | None, make: Callable[[], torch.Tensor | None], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The additive mask of a read under a window, made at most once a step."""
        if (read, window) not in self._masks:
            seen = make()
            self._masks[read, window] = None if seen is None else additive(seen, dtype)
        return self._masks[read, window]

    def keys_and_values(self, layer: int, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [tables of the read, num_keys, num_kv_heads, head_dim]: a view where a table is one run of blocks (it
        may run past the table's end, which the mask hides), else a copy."""
        storage, where = self._storage, self._where[read]
        pools = storage.keys[layer], storage.values[layer]
        if isinstance(where, slice):
            return pools[0][where].unsqueeze(0), pools[1][where].unsqueeze(0)
        _, num_kv_heads, head_dim = pools[0].shape
        shape = (where.shape[0], -1, num_kv_heads, head_dim)
        flat = where.flatten()
        keys, values = (
            pool.view(-1, storage.block_size * num_kv_heads * head_dim).index_select(0, flat).view(shape)
            for pool in pools
        )
        return keys[:, : read.num_keys], values[:, : read.num_keys]

    def row_ids(self, read: TailRead) -> torch.Tensor:
        return self._row_ids[read]

    def _locate(self, read: PromptRead | TrunkRead) -> slice | torch.Tensor:
        first, size = read.table[0], self._storage.block_size
        if list(read.table) == list(range(first, first + len(read.table))):
            return slice(first * size, first * size + read.num_keys)
        return self._blocks((read.table,), read.num_keys)

    def _blocks(self, tables: Sequence[Sequence[int]], num_keys: int) -> torch.Tensor:
        """Block ids [tables, blocks of num_keys], short tables padded with the zero block, long ones cut."""
        width = -(-num_keys // self._storage.block_size)
        zero = self._storage.zero_block
        return self._ints([[*table[:width], *[zero] * (width - len(table))] for table in tables])

    def _ints(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


class _LayerReader:
    """The reads of one layer."""

    def __init__(self, step: StepAttention, layer: int, kernel: Kernel, scores: Scores) -> None:
        self._step = step
        self._layer = layer
        self._kernel = kernel
        self._scale = scores.scale
        self._window = scores.window

    def prompt(self, read: PromptRead, rows: torch.Tensor) -> torch.Tensor:
        """Rows [rows, num_heads, head_dim] of a prompt against their prefix and themselves."""
        keys, values = self._step.keys_and_values(self._layer, read)
        mask = self._step.mask(read, self._window, lambda: prompt_mask(read, self._window, rows.device), rows.dtype)
        count, num_heads, head_dim = rows.shape
        num_kv_heads = keys.shape[2]
        siblings = num_heads // num_kv_heads
        query = rows.view(count, num_kv_heads, siblings, head_dim).permute(1, 2, 0, 3)
        # Query heads that share a key head sit in `heads`; their keys are expanded without a copy.
        shared = (num_kv_heads, siblings, read.num_keys, head_dim)
        output, _ = self._kernel(
            query,
            keys[0].transpose(0, 1).unsqueeze(1).expand(shared),
            values[0].transpose(0, 1).unsqueeze(1).expand(shared),
            mask=mask,
            scale=self._scale,
        )
        return output.permute(2, 0, 1, 3).reshape(count, num_heads, head_dim)

    def tails(self, plan: AttentionPlan, rows: torch.Tensor) -> torch.Tensor:
        """Rows [rows, num_heads, head_dim] of choices against their trunks and tails."""
        trunk, tail = torch.empty_like(rows, memory_format=torch.contiguous_format), torch.empty_like(rows)
        trunk_lse = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
        tail_lse = torch.empty_like(trunk_lse)
        for trunk_read in plan.trunks:
            span = slice(trunk_read.begin, trunk_read.end)
            trunk[span], trunk_lse[span] = self._folded(
                trunk_read, rows[span], partial(trunk_mask, trunk_read, self._window, rows.device)
            )
        for tail_read in plan.tails:
            ids = self._step.row_ids(tail_read)
            tail[ids], tail_lse[ids] = self._folded(
                tail_read, rows[ids], partial(tail_mask, tail_read, self._window, rows.device)
            )
        return merge(trunk, trunk_lse, tail, tail_lse)

    def _folded(
        self, read: TrunkRead | TailRead, rows: torch.Tensor, make: Callable[[int], torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [rows, heads, head_dim] and log-sum-exp [rows, heads] of one product a key head and table."""
        keys, values = self._step.keys_and_values(self._layer, read)
        siblings = rows.shape[1] // keys.shape[2]
        output, lse = self._kernel(
            _fold(rows, keys.shape[0], keys.shape[2]),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            mask=self._step.mask(read, self._window, lambda: make(siblings), rows.dtype),
            scale=self._scale,
        )
        return _unfold(output, rows.shape), _unfold(lse.unsqueeze(-1), (*rows.shape[:2], 1)).squeeze(-1)


def merge(one: torch.Tensor, one_lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Merges two parts [rows, heads, head_dim] with log-sum-exps [rows, heads]. The weights are expanded to head_dim
    before the sigmoid: on the CPU it gives other bits in the scalar end of a loop than in its body."""
    weight = torch.sigmoid((one_lse - other_lse).unsqueeze(-1).expand(one.shape).contiguous())
    return (one.float() * weight + other.float() * (1 - weight)).to(one.dtype)


def _fold(rows: torch.Tensor, batch: int, num_kv_heads: int) -> torch.Tensor:
    """[batch * r, heads, head_dim] -> [batch, kv heads, r * siblings, head_dim]: one product a key head."""
    total, num_heads, head_dim = rows.shape
    r, siblings = total // batch, num_heads // num_kv_heads
    return (
        rows.reshape(batch, r, num_kv_heads, siblings, head_dim)
        .transpose(1, 2)
        .reshape(batch, num_kv_heads, r * siblings, head_dim)
    )


def _unfold(folded: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `_fold`; `shape` is that of the rows."""
    total, num_heads, width = shape
    batch, num_kv_heads = folded.shape[:2]
    r, siblings = total // batch, num_heads // num_kv_heads
    return folded.reshape(batch, num_kv_heads, r, siblings, width).transpose(1, 2).reshape(total, num_heads, width)
