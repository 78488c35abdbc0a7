"""Changes the logits of a choice before a token is drawn: its grammar's mask (`Masks`), then forbidden tokens, bias and
penalties (`apply_edits`), in this order, in the memory of `LogitsScratch`.

Forbidden tokens and penalties touch a few tokens, so they are gathered, changed and put back, without a pass over the
vocabulary. The mask also removes tokens that may not end a choice with a grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.sample.candidates import BLOCK
from motet.engines.native.sample.lanes import uploaded, uploaded_ids
from motet.engines.native.sample.state import ChoiceSampling, TokenBias
from motet.grammar.compiled_grammar import fill_masks, mask_words


def apply_edits(x: torch.Tensor, states: Sequence[ChoiceSampling], *, vocab_size: int) -> None:
    """Changes the logits `x` [lanes, >= vocab_size] float32 in place; lane i belongs to `states[i]`. Ids outside the
    vocabulary (an end-of-sequence id for which the model has no logit) cannot be drawn and are passed over."""
    _forbid(x, states, vocab_size=vocab_size)
    _bias(x, states, vocab_size=vocab_size)
    _penalise(x, states, vocab_size=vocab_size)


def _forbid(x: torch.Tensor, states: Sequence[ChoiceSampling], *, vocab_size: int) -> None:
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


def _bias(x: torch.Tensor, states: Sequence[ChoiceSampling], *, vocab_size: int) -> None:
    """Adds one row for each group: its entries, which may be most of the vocabulary, are gone through once."""
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


def _penalise(x: torch.Tensor, states: Sequence[ChoiceSampling], *, vocab_size: int) -> None:
    """Applies repetition (Keskar et al., CTRL, 2019) over prompt and answer, frequency and presence (OpenAI) over
    answers."""
    counted = [(lane, state.counts) for lane, state in enumerate(states) if state.counts is not None]
    if not counted:
        return
    of_lane = np.repeat([lane for lane, _ in counted], [len(past.ids) for _, past in counted])
    seen = np.concatenate([past.ids for _, past in counted])
    counts = np.concatenate([past.counts for _, past in counted])
    table = np.stack([of_lane, of_lane * x.shape[1] + seen, counts])  # one copy to a device
    if not (known := seen < vocab_size).all():
        table = table[:, known]
    lanes, places, counts_of = uploaded(table, x.device).unbind(0)
    one_group = all(state.params is states[0].params for state in states)
    strengths = uploaded(np.array([_strengths(state) for state in states[: 1 if one_group else None]]), x.device)
    repetition, frequency, presence = (strengths if one_group else strengths[lanes]).unbind(1)
    flat = x.view(-1)
    value = flat.index_select(0, places)
    value = torch.where(value > 0, value / repetition, value * repetition)
    flat.scatter_(0, places, value - frequency * counts_of - presence * (counts_of > 0))


def _strengths(state: ChoiceSampling) -> npt.NDArray[np.float32]:
    params = state.params
    return np.array([params.repetition_penalty, params.frequency_penalty, params.presence_penalty], np.float32)


_CPU_ELEMENTS = 2**21  # 8 MB: 42 rows of a vocabulary of 49,152
_GPU_ELEMENTS = 2**25
_WORD = 32


@dataclass(frozen=True)
class LaneMasks:
    """The tokens that the grammars of one batch allow."""

    lanes: list[int]
    """Lanes whose choices have a grammar."""
    bits: npt.NDArray[np.int32]
    """[lanes, words]: bit t % 32 of word t // 32 is token t."""


class Masks:
    """Gives a token that its choice's grammar does not allow the logit -inf. It keeps nothing but a table.

        matchers ─► bits [lanes, words]     on the host; computed while a GPU is still at work on the logits
                 ─► 0 or -inf               on the device: each byte of bits finds its eight addends in a table
                 ─► added to the logits     so NaN stays NaN and is still found

    If a matcher fails, its lane has no token left and is no distribution; `ChoiceSampling.failure` says why.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = mask_words(vocab_size)
        self._vocab_size = vocab_size
        self._device = device

    def fill(self, states: Sequence[ChoiceSampling]) -> LaneMasks:
        """Returns the tokens that the choices of a batch's lanes may write next."""
        lanes = [lane for lane, state in enumerate(states) if state.matcher is not None]
        constrained = [states[lane] for lane in lanes]
        bits = np.zeros((len(lanes), self._words), np.int32)
        failed = fill_masks([state.matcher for state in constrained if state.matcher is not None], bits)
        for row, state in enumerate(constrained):
            state.bias.narrow(bits[row])
            _take_endings(bits[row], state, vocab_size=self._vocab_size)
            if row in failed:
                state.fail(failed[row].message)
            elif not bits[row].any():
                listed = " of allowed_token_ids" if state.params.allowed_token_ids else ""
                state.fail(f"its grammar allows no token{listed} here, not even the end")
            if state.failure is not None:
                bits[row] = 0
        return LaneMasks(lanes, bits)

    def apply(self, x: torch.Tensor, masks: LaneMasks, *, spare: torch.Tensor) -> None:
        """Changes the logits `x` [lanes, >= words * 32] float32 in place. `spare` is memory of the shape of `x`."""
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
    def _table(self) -> torch.Tensor:
        """What each byte adds to the logits of its eight tokens, [256, 8] float32."""
        allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        return uploaded(np.where(allowed, np.float32(0), np.float32(-np.inf)), self._device)


def _take_endings(bits: npt.NDArray[np.int32], state: ChoiceSampling, *, vocab_size: int) -> None:
    """Takes out of a row the tokens that must not end its choice yet, unless the grammar allows nothing else."""
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
    """Float32 copies of up to `capacity` rows of logits, padded to whole blocks with tokens of logit -inf. The next
    `load` overwrites what the last one returned.

    The memory is taken once. A fresh 25 MB tensor a step costs more in page faults than the arithmetic on it, and a
    copy that stays small stays in the cache.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, max_rows: int | None = None) -> None:
        width = -(-vocab_size // BLOCK) * BLOCK
        elements = _CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS
        fitting = elements // width
        self.capacity = max(1, fitting if max_rows is None else min(fitting, max_rows))
        self._vocab_size = vocab_size
        self._x = torch.empty(self.capacity, width, device=device)
        self._y = torch.empty_like(self._x)

    def load(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Returns `logits[rows]` [len(rows), padded vocabulary] float32, free to be changed."""
        x = self._x[: len(rows)]
        first, last = rows[0], rows[-1]
        if list(rows) == list(range(first, last + 1)):
            source = logits[first : last + 1]
        else:
            source = logits[uploaded_ids(rows, logits.device)]
        x[:, : self._vocab_size].copy_(source)
        x[:, self._vocab_size :].fill_(-torch.inf)
        return x

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        """Returns room for a result of the shape of `x`, which `load` returned."""
        return self._y[: len(x)]
