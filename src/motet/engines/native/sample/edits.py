"""Changes the logits of a choice before a token is sampled: its grammar's mask (`GrammarMasks`), then forbidden tokens,
bias and penalties (`apply_edits`), in this order, in the memory of `LogitsScratch`.

Forbidden tokens and penalties affect few tokens. Their logits are gathered, changed and scattered back, without a pass
over the vocabulary. For a choice with a grammar, the mask also removes the tokens that must not end the choice yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motet.engines.native.sample.candidates import BLOCK
from motet.engines.native.sample.lanes import uploaded, uploaded_ids
from motet.engines.native.sample.state import ChoiceSampling, TokenBias
from motet.grammar.compiled_grammar import fill_masks, mask_words


def apply_edits(x: Tensor, states: Sequence[ChoiceSampling], *, vocab_size: int) -> None:
    """Changes the logits `x` [lanes, >= vocab_size] float32 in place; lane i belongs to `states[i]`. Ids outside the
    vocabulary (an end-of-sequence id for which the model has no logit) cannot be sampled and are ignored."""
    _forbid(x, states, vocab_size=vocab_size)
    _bias(x, states, vocab_size=vocab_size)
    _penalise(x, states, vocab_size=vocab_size)


def _forbid(x: Tensor, states: Sequence[ChoiceSampling], *, vocab_size: int) -> None:
    entries = [
        (lane, token_id)
        for lane, state in enumerate(states)
        if state.matcher is None
        for token_id in state.forbidden_ids()
        if token_id < vocab_size
    ]
    if entries:
        lanes, ids = uploaded(np.array(entries, np.int64), x.device).unbind(1)
        x[lanes, ids] = -torch.inf


def _bias(x: Tensor, states: Sequence[ChoiceSampling], *, vocab_size: int) -> None:
    """Adds one row for each group, made once because it can have an entry for most tokens of the vocabulary."""
    lanes_of: dict[TokenBias, list[int]] = {}
    for lane, state in enumerate(states):
        if state.bias:
            lanes_of.setdefault(state.bias, []).append(lane)
    for bias, lanes in lanes_of.items():
        row = bias.row(x.shape[1], x.device, vocab_size=vocab_size)
        if len(lanes) == len(x):
            x.add_(row)
        else:
            x.index_add_(0, uploaded_ids(lanes, x.device), row.expand(len(lanes), -1))


def _penalise(x: Tensor, states: Sequence[ChoiceSampling], *, vocab_size: int) -> None:
    """Applies the repetition penalty (Keskar et al., CTRL, 2019) over prompt and output tokens, and the frequency and
    presence penalties (OpenAI) over output tokens."""
    counts_by_lane = [(lane, state.counts) for lane, state in enumerate(states) if state.counts is not None]
    if not counts_by_lane:
        return
    lane_of = np.repeat([lane for lane, _ in counts_by_lane], [len(counts.ids) for _, counts in counts_by_lane])
    token_ids = np.concatenate([counts.ids for _, counts in counts_by_lane])
    token_counts = np.concatenate([counts.counts for _, counts in counts_by_lane])
    # [3, entries]: lane, index in the flattened logits, count; one copy to the device
    table = np.stack([lane_of, lane_of * x.shape[1] + token_ids, token_counts])
    if not (known := token_ids < vocab_size).all():
        table = table[:, known]
    lanes, indices, counts_of = uploaded(table, x.device).unbind(0)
    one_group = all(state.params is states[0].params for state in states)
    strengths = uploaded(np.array([_strengths(state) for state in states[: 1 if one_group else None]]), x.device)
    repetition, frequency, presence = (strengths if one_group else strengths[lanes]).unbind(1)
    flat = x.view(-1)
    value = flat.index_select(0, indices)
    value = torch.where(value > 0, value / repetition, value * repetition)
    flat.scatter_(0, indices, value - frequency * counts_of - presence * (counts_of > 0))


def _strengths(state: ChoiceSampling) -> npt.NDArray[np.float32]:
    """Returns the repetition, frequency and presence penalties, [3]."""
    params = state.params
    return np.array([params.repetition_penalty, params.frequency_penalty, params.presence_penalty], np.float32)


_CPU_ELEMENTS = 2**21  # 8 MB: 42 rows of a vocabulary of 49,152
_GPU_ELEMENTS = 2**25
_WORD = 32


@dataclass(frozen=True)
class LaneMasks:
    """Tokens that the grammars of one batch allow."""

    lanes: list[int]
    """Indices of the batch's lanes whose choices have a grammar."""
    bits: npt.NDArray[np.int32]
    """[len(lanes), words]: bit t % 32 of word t // 32 is set if token t is allowed."""


class GrammarMasks:
    """Sets the logit of tokens that a choice's grammar does not allow to -inf. Its only state is a lookup table.

        matchers ─► bits [lanes, words]     on the host, while a GPU still computes the logits
                 ─► 0 or -inf               on the device: a table has eight addends for each value of a byte
                 ─► added to the logits     so NaN stays NaN and is detected later

    If a matcher fails, its lane allows no token, so it is not a distribution; `ChoiceSampling.failure` has the reason.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = mask_words(vocab_size)
        self._vocab_size = vocab_size
        self._device = device

    def fill(self, states: Sequence[ChoiceSampling]) -> LaneMasks:
        """Returns the next tokens that are allowed in a batch's lanes, whose states are `states`."""
        lanes = [lane for lane, state in enumerate(states) if state.matcher is not None]
        constrained = [states[lane] for lane in lanes]
        bits = np.zeros((len(lanes), self._words), np.int32)
        failed = fill_masks([state.matcher for state in constrained if state.matcher is not None], bits)
        for row, state in enumerate(constrained):
            _add_stop_tokens(bits[row], state, vocab_size=self._vocab_size)
            state.bias.mask_disallowed(bits[row])
            _remove_early_endings(bits[row], state, vocab_size=self._vocab_size)
            if row in failed:
                state.fail(failed[row].message)
            elif not bits[row].any():
                listed = " of allowed_token_ids" if state.params.allowed_token_ids else ""
                listed += " except bad_words" if state.params.bad_word_ids else ""
                state.fail(f"its grammar allows no token{listed} here, not even the end")
            if state.failure is not None:
                bits[row] = 0
        return LaneMasks(lanes, bits)

    def apply(self, x: Tensor, masks: LaneMasks, *, spare: Tensor) -> None:
        """Changes the logits `x` [lanes, >= words * 32] float32 in place. Overwrites `spare`, of the same shape."""
        if not masks.lanes:
            return
        size = len(masks.lanes), self._words * _WORD
        addends = spare.view(-1)[: size[0] * size[1]]
        packed = uploaded(masks.bits.view(np.uint8).ravel(), self._device)
        torch.index_select(self._table, 0, packed.int(), out=addends.view(-1, 8))
        if len(masks.lanes) == len(x):
            x[:, : size[1]].add_(addends.view(size))
        else:
            x[:, : size[1]].index_add_(0, uploaded_ids(masks.lanes, self._device), addends.view(size))

    @cached_property
    def _table(self) -> Tensor:
        """Addends [256, 8] float32 for the logits of eight tokens, by the value of their byte in the bits."""
        allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        return uploaded(np.where(allowed, np.float32(0), np.float32(-np.inf)), self._device)


def _add_stop_tokens(bits: npt.NDArray[np.int32], state: ChoiceSampling, *, vocab_size: int) -> None:
    """Adds the stop tokens to the mask `bits` [words] of a choice whose grammar allows the end."""
    if state.params.stop_token_ids and state.can_end:
        words = bits.view(np.uint32)
        for token_id in state.params.stop_token_ids:
            if token_id < vocab_size:
                words[token_id // _WORD] |= np.uint32(1 << (token_id % _WORD))


def _remove_early_endings(bits: npt.NDArray[np.int32], state: ChoiceSampling, *, vocab_size: int) -> None:
    """Removes tokens that must not end the choice yet from its mask `bits` [words], unless it allows no others."""
    ids = [
        token_id
        for token_id in state.forbidden_ids()
        if token_id < vocab_size and bits[token_id // _WORD] >> (token_id % _WORD) & 1
    ]
    if not ids:
        return
    left = bits.copy()
    words = left.view(np.uint32)
    for token_id in ids:
        words[token_id // _WORD] &= ~np.uint32(1 << (token_id % _WORD))
    if left.any():
        bits[:] = left


class LogitsScratch:
    """Float32 copies of up to `capacity` rows of logits, padded to a multiple of `BLOCK` with tokens of logit -inf.
    Each `load` overwrites the result of the previous `load`.

    The memory is allocated once. Page faults of a new 25 MB tensor in each step would take longer than the arithmetic
    on it, and a small copy stays in the CPU's cache."""

    def __init__(self, vocab_size: int, device: torch.device, *, max_rows: int | None = None) -> None:
        width = -(-vocab_size // BLOCK) * BLOCK
        elements = _CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS
        fitting = elements // width
        self.capacity = max(1, fitting if max_rows is None else min(fitting, max_rows))
        self._vocab_size = vocab_size
        self._x = torch.empty(self.capacity, width, device=device)
        self._y = torch.empty_like(self._x)

    def load(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns `logits[rows]` [len(rows), padded vocabulary] float32, which the caller can modify."""
        x = self._x[: len(rows)]
        first, last = rows[0], rows[-1]
        if list(rows) == list(range(first, last + 1)):
            source = logits[first : last + 1]
        else:
            source = logits[uploaded_ids(rows, logits.device)]
        x[:, : self._vocab_size].copy_(source)
        x[:, self._vocab_size :].fill_(-torch.inf)
        return x

    def spare_like(self, x: Tensor) -> Tensor:
        """Returns memory for a result of the same shape as `x`, which is a result of `load`."""
        return self._y[: len(x)]
