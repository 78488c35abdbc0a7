"""Attention of one step over paged KV: trunks once for all rows that share them, each tail on its own, merged.

The merge of softmax parts p over disjoint keys, with log-sum-exps l, is
    output = sum(w * p) / sum(w),   w = exp(l - max(l))
(the rule of FlashDecoding and of FlashInfer's cascade attention). A row's parts are the stretches of its trunk and its
tail, in this order, whoever shares them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F

from motet.engines.native.attention.attention_plan import (
    AttentionPlan,
    PromptRead,
    StretchRead,
    Table,
    TailRead,
    num_stretches,
)
from motet.engines.native.attention.trees import SharingGain, branches, keys_joined
from motet.engines.native.kv.storage import KVStorage

Read = PromptRead | StretchRead | TailRead

Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], tuple[torch.Tensor, torch.Tensor]
]
"""An attention operator that also returns the log-sum-exp, which is what makes two partial results mergeable.

    query       [batch, heads, rows, head_dim]
    key, value  [batch, heads, keys, head_dim]
    mask        [batch or 1, 1, rows, keys] additive, of the query's dtype, or None
    scale       of the scores
    returns     output [batch, heads, rows, head_dim] in the query's dtype, log-sum-exp [batch, heads, rows] float32

A row whose keys are all masked comes back with output 0 and log-sum-exp minus infinity."""

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  the only way to its log-sum-exp

_LANES = 16
"""Floats in the largest vector of a CPU."""

_ONE_THREAD = 32_768
"""Numbers of which torch lets one thread compute an exponential each."""

_WORTH = SharingGain(rows_at_once=16, least_keys=512)
"""Measured: one more reading costs as much as joining two stretches saves, and beyond 16 rows a row costs the same in
any company."""


@dataclass(frozen=True)
class Scores:
    """How a layer scores keys: scale, window and cap."""

    scale: float
    window: int | None = None
    """Number of keys that a query sees, itself included; None: all before it."""
    softcap: float | None = None


class StepAttention:
    """One step's attention, called by every layer in turn. Index tensors and masks are made once and kept."""

    def __init__(self, plan: AttentionPlan, slots: torch.Tensor, *, storage: KVStorage) -> None:
        self._plan = plan
        self._slots = slots  # [num_tokens] int64: where each row's key and value go
        self._storage = storage
        self._device = storage.keys.device
        self.non_finite = torch.zeros_like(slots, dtype=torch.bool)
        """[num_tokens]: rows that reached the last layer as NaN or infinity. A row that is not finite stays so, but its
        stored KV is finite and would look correct."""
        self._masks: dict[tuple[Read, int | None], torch.Tensor | None] = {}
        self._places: dict[Read, slice | torch.Tensor] = {}
        """The place of each read's keys: slots in one run, or block ids [tables, blocks]."""
        tree = branches(plan.trunks, block_size=storage.block_size, worth=_WORTH)
        self.trunk_tokens_joined = keys_joined(tree)
        self._stretches = [read for branch in tree for read in branch.reads(storage.block_size)]
        self._num_parts = 1 + max((num_stretches(trunk.num_keys) for trunk in plan.trunks), default=0)
        """The most parts of a row: the stretches of its trunk, and its tail."""
        for prompt in plan.prompts:
            self._places[prompt] = self._locate((prompt.table,), prompt.num_keys)
        for stretches in self._stretches:
            self._places[stretches] = self._locate(stretches.tables, stretches.num_keys)
        for tail in plan.tails:
            self._places[tail] = self._blocks(tail.tables, tail.num_keys)
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
            self.non_finite = ~values[:num_tokens].isfinite().flatten(1).all(1)
        rows = query[0].transpose(0, 1)  # [rows, num_heads, head_dim]
        output = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        for prompt in self._plan.prompts:
            span = slice(prompt.begin, prompt.end)
            output[span] = self._prompt(layer, scores, read=prompt, rows=rows[span])
        count = self._plan.num_tail_rows
        if count:
            output[:count] = self._tails(layer, scores, rows=rows[:count])
        return output.unsqueeze(0)

    def _prompt(self, layer: int, scores: Scores, *, read: PromptRead, rows: torch.Tensor) -> torch.Tensor:
        """Rows [rows, num_heads, head_dim] of a prompt against their prefix and themselves."""
        keys, values = self._keys_and_values(layer, read)
        count, num_heads, head_dim = rows.shape
        num_kv_heads = keys.shape[2]
        siblings = num_heads // num_kv_heads
        # Query heads that share a key head sit in `heads`; their keys are expanded without a copy.
        shared = (num_kv_heads, siblings, read.num_keys, head_dim)
        output, _ = kernel_for(self._device, scores.softcap)(
            rows.view(count, num_kv_heads, siblings, head_dim).permute(1, 2, 0, 3),
            keys[0].transpose(0, 1).unsqueeze(1).expand(shared),
            values[0].transpose(0, 1).unsqueeze(1).expand(shared),
            self._mask(read, scores.window, siblings=1, dtype=rows.dtype),
            scores.scale,
        )
        return output.permute(2, 0, 1, 3).reshape(count, num_heads, head_dim)

    def _tails(self, layer: int, scores: Scores, *, rows: torch.Tensor) -> torch.Tensor:
        """Rows [rows, num_heads, head_dim] of choices against their trunks and tails."""
        shape = (self._num_parts, *rows.shape)
        parts = torch.zeros(shape, dtype=rows.dtype, device=rows.device)
        lse = torch.full(shape[:3], float("-inf"), device=rows.device)  # parts that a row does not have weigh nothing
        for read in self._stretches:
            span = slice(read.begin, read.end)
            where = slice(read.first, read.first + len(read.tables)), span
            parts[where], lse[where] = self._folded(layer, scores, read=read, rows=rows[None, span])
        for tail, ids in self._row_ids.items():
            output, weight = self._folded(
                layer, scores, read=tail, rows=rows[ids].view(len(tail.tables), -1, *shape[2:])
            )
            parts[-1, ids], lse[-1, ids] = output.flatten(0, 1), weight.flatten(0, 1)
        return merge(parts, lse)

    def _folded(
        self, layer: int, scores: Scores, *, read: StretchRead | TailRead, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [tables, rows, heads, head_dim] and log-sum-exp [tables, rows, heads] of one product a key head and
        table. `rows` are those of each table, or [1, rows, heads, head_dim] if all are read for the same ones."""
        keys, values = self._keys_and_values(layer, read)
        siblings = rows.shape[2] // keys.shape[2]
        output, lse = kernel_for(self._device, scores.softcap)(
            _fold(rows, siblings).expand(len(keys), -1, -1, -1),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self._mask(read, scores.window, siblings=siblings, dtype=rows.dtype),
            scores.scale,
        )
        return _unfold(output, siblings), _unfold(lse.unsqueeze(-1), siblings).squeeze(-1)

    def _mask(self, read: Read, window: int | None, *, siblings: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask of a read under a window, made once a step: 0 where a key is seen, minus infinity elsewhere."""
        if (read, window) not in self._masks:
            seen = read.seen(window, siblings=siblings, device=self._device)
            self._masks[read, window] = None
            if seen is not None:
                zeros = torch.zeros(seen.shape, dtype=dtype, device=self._device)
                self._masks[read, window] = zeros.masked_fill_(~seen, float("-inf"))
        return self._masks[read, window]

    def _keys_and_values(self, layer: int, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [tables of the read, num_keys, num_kv_heads, head_dim]: a view where the tables are one run of blocks
        (which may run past the end of a prompt's, where the mask hides it), else a copy."""
        storage, place = self._storage, self._places[read]
        pools = storage.keys[layer], storage.values[layer]
        _, num_kv_heads, head_dim = pools[0].shape
        if isinstance(place, slice):
            keys, values = (pool[place].view(-1, read.num_keys, num_kv_heads, head_dim) for pool in pools)
            return keys, values
        shape = (place.shape[0], -1, num_kv_heads, head_dim)
        flat = place.flatten()
        keys, values = (
            pool.view(-1, storage.block_size * num_kv_heads * head_dim).index_select(0, flat).view(shape)
            for pool in pools
        )
        return keys[:, : read.num_keys], values[:, : read.num_keys]

    def _locate(self, tables: Sequence[Table], num_keys: int) -> slice | torch.Tensor:
        blocks, size = list(chain.from_iterable(tables)), self._storage.block_size
        first = blocks[0]
        if blocks == list(range(first, first + len(blocks))):
            return slice(first * size, first * size + len(tables) * num_keys)
        return self._blocks(tables, num_keys)

    def _blocks(self, tables: Sequence[Table], num_keys: int) -> torch.Tensor:
        """Block ids [tables, blocks of num_keys]; short tables are padded with the zero block, long ones cut."""
        width = -(-num_keys // self._storage.block_size)
        zero = self._storage.num_blocks
        return self._ints([[*table[:width], *[zero] * (width - len(table))] for table in tables])

    def _ints(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def kernel_for(device: torch.device, softcap: float | None) -> Kernel:
    """Returns the best operator here for a device and a model."""
    if softcap is not None:
        return partial(plain, softcap=softcap)
    return flash_cpu if device.type == "cpu" else plain


def flash_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash attention for the CPU. Query rows are padded to a multiple of 4: for other numbers it uses other
    loops, which give other bits."""
    rows = query.shape[2]
    missing = -rows % 4
    if missing:
        query = F.pad(query, (0, 0, 0, missing))
        if mask is not None:
            mask = F.pad(mask, (0, 0, 0, missing))
    output, lse = _FLASH_CPU(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    if missing:
        output, lse = output[:, :, :rows], lse[:, :, :rows]
        mask = None if mask is None else mask[:, :, :rows]
    if mask is not None:
        blind = torch.isneginf(mask).all(-1)  # [batch or 1, 1, rows]; the operator says log-sum-exp 0 for these
        lse = lse.masked_fill(blind, float("-inf"))
    return output, lse


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32, on any device; with softcap (Gemma 2), scores = cap * tanh(scores / cap).

    Rows are padded to a multiple of 4 and keys to one of 64, so that the bits do not depend on other rows (see
    `flash_cpu`).
    """
    rows, keys = query.shape[2], key.shape[2]
    q = F.pad(query, (0, 0, 0, -rows % 4)).float()
    k, v = (F.pad(x, (0, 0, 0, -keys % 64)).float() for x in (key, value))
    scores = torch.matmul(q, k.transpose(2, 3)) * scale  # [batch, heads, rows, keys], both padded
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores[:, :, :rows, :keys] += mask
    scores[..., keys:] = float("-inf")
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num()  # a row of minus infinities: 0, not NaN
    return torch.matmul(weights, v)[:, :, :rows].to(query.dtype), lse[:, :, :rows]


def merge(parts: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Merges parts [parts, rows, heads, head_dim] with log-sum-exps [parts, rows, heads], in their order; a part with
    log-sum-exp minus infinity changes nothing. Each weight is computed in all `_LANES` of a vector, and threads share
    none: on the CPU the exponential may give other bits in the scalar end of a loop than in its body."""
    levels = (lse - lse.amax(0)).unsqueeze(-1).expand(*lse.shape, _LANES).contiguous()
    flat = levels.view(-1)
    for at in range(0, len(flat), _ONE_THREAD):
        flat[at : at + _ONE_THREAD].exp_()
    weights = levels[..., :1]
    weighed = parts * weights  # float32
    output, total = weighed[0], weights[0]
    for part, weight in zip(weighed[1:], weights[1:], strict=True):
        output, total = output + part, total + weight
    return (output / total).to(parts.dtype)


def _fold(rows: torch.Tensor, siblings: int) -> torch.Tensor:
    """[batch, rows, heads, head_dim] -> [batch, kv heads, rows * siblings, head_dim]: one product a key head."""
    batch, count, num_heads, head_dim = rows.shape
    return rows.reshape(batch, count, num_heads // siblings, siblings, head_dim).transpose(1, 2).flatten(2, 3)


def _unfold(folded: torch.Tensor, siblings: int) -> torch.Tensor:
    """The inverse of `_fold`."""
    batch, num_kv_heads, count, width = folded.shape
    return folded.reshape(batch, num_kv_heads, count // siblings, siblings, width).transpose(1, 2).flatten(2, 3)
