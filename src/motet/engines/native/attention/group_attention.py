"""Attention of one step over paged KV: each trunk is read once for all rows that share it, each tail separately, and
the results are merged.

The merge of softmax parts p over disjoint keys, with log-sum-exps l, is
    output = sum(w * p) / sum(w),   w = exp(l - max(l))
as in FlashDecoding and in FlashInfer's cascade attention. A row's parts are the stretches of its trunk and its tail, in
this order, independent of the rows that share them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.engines.native.attention.attention_plan import (
    AttentionPlan,
    PromptRead,
    StretchRead,
    Table,
    TailRead,
    num_stretches,
)
from motet.engines.native.attention.trees import SharingGain, branches, keys_saved
from motet.engines.native.kv.storage import KVStorage

Read = PromptRead | StretchRead | TailRead

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
"""An attention operator that also returns the log-sum-exp, which is needed to merge partial results.

    query       [batch, heads, rows, head_dim]
    key, value  [batch, heads, keys, head_dim]
    mask        [batch or 1, 1, rows, keys] additive, of the query's dtype, or None
    scale       of the scores
    returns     output [batch, heads, rows, head_dim] in the query's dtype, log-sum-exp [batch, heads, rows] float32

A row whose keys are all masked has output 0 and log-sum-exp minus infinity."""

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  only this operator returns the log-sum-exp

_LANES = 16
"""Number of floats in the largest vector register of a CPU."""

_ONE_THREAD = 32_768
"""Number of elements up to which torch computes exponentials in one thread."""

_GAIN = SharingGain(rows_at_once=16, min_keys_saved=512)
"""Measured: one more read takes as long as sharing two stretches saves; above 16 rows, the time per row is constant."""


@dataclass(frozen=True)
class Scores:
    """Parameters of a layer's attention scores."""

    scale: float
    window: int | None = None
    """Number of keys that a query sees, including its own. None if it sees all previous keys."""
    softcap: float | None = None
    """Cap c of the scores s, c * tanh(s / c). None if they are not capped."""
    sinks: Tensor | None = field(default=None, compare=False)
    """Attention sinks [num_heads]: the score of each head for a key without a value (GPT-OSS). None without them."""


class StepAttention:
    """Attention of one step, called by every layer in order. Index tensors and masks are made once per step."""

    def __init__(self, plan: AttentionPlan, slots: Tensor, *, storage: KVStorage) -> None:
        self._plan = plan
        self._slots = slots  # [num_tokens] int64: slot of each row's key and value
        self._storage = storage
        self._device = storage.keys.device
        self.non_finite = torch.zeros_like(slots, dtype=torch.bool)
        """[num_tokens] bool: rows with NaN or infinity in the last layer. A row that is not finite stays so in all
        later layers, but its stored KV is made finite and would look correct."""
        self._masks: dict[tuple[Read, int | None], Tensor | None] = {}
        self._locations: dict[Read, slice | Tensor] = {}
        """Location of each read's keys: a contiguous slice of slots, or block ids [tables, blocks]."""
        tree = branches(plan.trunks, block_size=storage.block_size, gain=_GAIN)
        self.trunk_tokens_saved = keys_saved(tree)
        self._stretches = [read for branch in tree for read in branch.reads(storage.block_size)]
        self._num_parts = 1 + max((num_stretches(trunk.num_keys) for trunk in plan.trunks), default=0)
        """Maximum number of parts of a row: the stretches of its trunk, and its tail."""
        for prompt in plan.prompts:
            self._locations[prompt] = self._locate((prompt.table,), prompt.num_keys)
        for stretches in self._stretches:
            self._locations[stretches] = self._locate(stretches.tables, stretches.num_keys)
        for tail in plan.tails:
            self._locations[tail] = self._blocks(tail.tables, tail.num_keys)
        self._row_ids = {read: self._ints(read.rows) for read in plan.tails}

    def attend(
        self,
        layer: int,
        query: Tensor,  # [1, num_heads, rows, head_dim], rows padded
        key: Tensor,  # [1, num_kv_heads, rows, head_dim]
        value: Tensor,
        scores: Scores,
    ) -> Tensor:
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

    def _prompt(self, layer: int, scores: Scores, *, read: PromptRead, rows: Tensor) -> Tensor:
        """Returns the attention [rows, num_heads, head_dim] of prompt rows of this shape over the keys of `read`."""
        keys, values = self._keys_and_values(layer, read)
        count, num_heads, head_dim = rows.shape
        num_kv_heads = keys.shape[2]
        heads_per_kv_head = num_heads // num_kv_heads
        # [kv heads, query heads of each, keys, head_dim]: keys are expanded without a copy.
        shared = (num_kv_heads, heads_per_kv_head, read.num_keys, head_dim)
        output, lse = kernel_for(self._device, scores.softcap)(
            rows.view(count, num_kv_heads, heads_per_kv_head, head_dim).permute(1, 2, 0, 3),
            keys[0].transpose(0, 1).unsqueeze(1).expand(shared),
            values[0].transpose(0, 1).unsqueeze(1).expand(shared),
            self._mask(read, scores.window, heads_per_kv_head=1, dtype=rows.dtype),
            scores.scale,
        )
        output = output.permute(2, 0, 1, 3).reshape(count, num_heads, head_dim)
        if scores.sinks is None:
            return output
        lse = lse.permute(2, 0, 1).reshape(1, count, num_heads)
        return merge(*with_sinks(output.unsqueeze(0), lse, scores.sinks))

    def _tails(self, layer: int, scores: Scores, *, rows: Tensor) -> Tensor:
        """Returns the attention [rows, num_heads, head_dim] of tail rows of this shape over their trunks and tails."""
        shape = (self._num_parts, *rows.shape)
        parts = torch.zeros(shape, dtype=rows.dtype, device=rows.device)
        lse = torch.full(shape[:3], float("-inf"), device=rows.device)  # missing parts have weight 0
        for read in self._stretches:
            span = slice(read.begin, read.end)
            where = slice(read.first, read.first + len(read.tables)), span
            parts[where], lse[where] = self._folded(layer, scores, read=read, rows=rows[None, span])
        for tail, ids in self._row_ids.items():
            output, weight = self._folded(
                layer, scores, read=tail, rows=rows[ids].view(len(tail.tables), -1, *shape[2:])
            )
            parts[-1, ids], lse[-1, ids] = output.flatten(0, 1), weight.flatten(0, 1)
        return merge(parts, lse) if scores.sinks is None else merge(*with_sinks(parts, lse, scores.sinks))

    def _folded(
        self, layer: int, scores: Scores, *, read: StretchRead | TailRead, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns output [tables, rows, heads, head_dim] and log-sum-exp [tables, rows, heads], with one product per
        key head and table. `rows`: [tables, rows, heads, head_dim], with 1 table if the same rows read all tables."""
        keys, values = self._keys_and_values(layer, read)
        heads_per_kv_head = rows.shape[2] // keys.shape[2]
        output, lse = kernel_for(self._device, scores.softcap)(
            _regroup(rows, heads_per_kv_head).expand(len(keys), -1, -1, -1),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self._mask(read, scores.window, heads_per_kv_head=heads_per_kv_head, dtype=rows.dtype),
            scores.scale,
        )
        return _regroup(output, heads_per_kv_head), _regroup(lse.unsqueeze(-1), heads_per_kv_head).squeeze(-1)

    def _mask(self, read: Read, window: int | None, *, heads_per_kv_head: int, dtype: torch.dtype) -> Tensor | None:
        """Returns the additive mask of a read with a window: 0 where a key is visible, else minus infinity. None if all
        keys are visible. Each mask is made once per step."""
        if (read, window) not in self._masks:
            visible = read.visible(window, heads_per_kv_head=heads_per_kv_head, device=self._device)
            self._masks[read, window] = None
            if visible is not None:
                zeros = torch.zeros(visible.shape, dtype=dtype, device=self._device)
                self._masks[read, window] = zeros.masked_fill_(~visible, float("-inf"))
        return self._masks[read, window]

    def _keys_and_values(self, layer: int, read: Read) -> tuple[Tensor, Tensor]:
        """Returns keys and values, each [tables of the read, num_keys, num_kv_heads, head_dim]: views if the tables'
        blocks are contiguous, else copies. The mask hides the keys of a prompt's view after its last block."""
        storage, location = self._storage, self._locations[read]
        pools = storage.keys[layer], storage.values[layer]
        _, num_kv_heads, head_dim = pools[0].shape
        if isinstance(location, slice):
            keys, values = (pool[location].view(-1, read.num_keys, num_kv_heads, head_dim) for pool in pools)
            return keys, values
        shape = (location.shape[0], -1, num_kv_heads, head_dim)
        flat = location.flatten()
        keys, values = (
            pool.view(-1, storage.block_size * num_kv_heads * head_dim).index_select(0, flat).view(shape)
            for pool in pools
        )
        return keys[:, : read.num_keys], values[:, : read.num_keys]

    def _locate(self, tables: Sequence[Table], num_keys: int) -> slice | Tensor:
        """Returns the slice of slots of the tables' keys if their blocks are contiguous, else their block ids."""
        blocks, size = list(chain.from_iterable(tables)), self._storage.block_size
        first = blocks[0]
        if blocks == list(range(first, first + len(blocks))):
            return slice(first * size, first * size + len(tables) * num_keys)
        return self._blocks(tables, num_keys)

    def _blocks(self, tables: Sequence[Table], num_keys: int) -> Tensor:
        """Returns block ids [tables, blocks of num_keys] int64: tables padded with the zero block, or truncated."""
        width = -(-num_keys // self._storage.block_size)
        zero = self._storage.num_blocks
        return self._ints([[*table[:width], *[zero] * (width - len(table))] for table in tables])

    def _ints(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def kernel_for(device: torch.device, softcap: float | None) -> Kernel:
    """Returns the fastest operator for a device and a model's cap of scores."""
    if softcap is not None:
        return partial(plain, softcap=softcap)
    return flash_cpu if device.type == "cpu" else plain


def flash_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Calls torch's flash attention for the CPU. Query rows are padded to a multiple of 4, because torch uses different
    loops, which give different bits, for other numbers of rows."""
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
        blind = torch.isneginf(mask).all(-1)  # [batch or 1, 1, rows]; the operator returns log-sum-exp 0 for these
        lse = lse.masked_fill(blind, float("-inf"))
    return output, lse


def plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Computes attention by its definition, in float32, on any device; with softcap (Gemma 2), scores = cap *
    tanh(scores / cap). Rows are padded to a multiple of 4 and keys to a multiple of 64, so that the bits do not depend
    on other rows (see `flash_cpu`)."""
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
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num()  # 0 instead of NaN in a row of minus infinities
    return torch.matmul(weights, v)[:, :, :rows].to(query.dtype), lse[:, :, :rows]


def merge(parts: Tensor, lse: Tensor) -> Tensor:
    """Merges parts [parts, rows, heads, head_dim] with log-sum-exps [parts, rows, heads] float32, in their order.
    Returns [rows, heads, head_dim].

    A part with log-sum-exp minus infinity has no effect. Each weight is computed in all `_LANES` of a vector, in one
    thread: on the CPU, the exponential can have different bits in the scalar end of a loop than in its vector body."""
    levels = (lse - lse.amax(0)).unsqueeze(-1).expand(*lse.shape, _LANES).contiguous()
    flat = levels.view(-1)
    for at in range(0, len(flat), _ONE_THREAD):
        flat[at : at + _ONE_THREAD].exp_()
    weights = levels[..., :1]
    weighted = parts * weights  # float32
    output, total = weighted[0], weights[0]
    for part, weight in zip(weighted[1:], weights[1:], strict=True):
        output, total = output + part, total + weight
    return (output / total).to(parts.dtype)


def with_sinks(parts: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a part without values, with the sinks [heads] as its scores, to the arguments of `merge`."""
    weights = sinks.detach().float().expand_as(lse[:1])
    return torch.cat([parts, torch.zeros_like(parts[:1])]), torch.cat([lse, weights])


def _regroup(x: Tensor, heads_per_kv_head: int) -> Tensor:
    """Turns [batch, rows, heads, width] into [batch, kv heads, rows * heads_per_kv_head, width], which needs one
    product per key head, and turns that back."""
    batch, count, _, width = x.shape
    return x.reshape(batch, count, -1, heads_per_kv_head, width).transpose(1, 2).flatten(2, 3)
