"""What grammars leave of logits: a token that its choice's grammar does not allow gets -inf, before all other edits.

    matchers ─► bits [lanes, words]     on the host; computed while a GPU is still at work on the logits
             ─► 0 or -inf               on the device: each byte of bits finds its eight addends in a table
             ─► added to the logits     so NaN stays NaN and is still found

A matcher that fails leaves nothing of its lane, which then is no distribution; `ChoiceSampling.failure` says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.sample.state import ChoiceSampling
from motet.engines.native.sample.upload import uploaded, uploaded_ids
from motet.grammar.masks import fill_masks, mask_words

_WORD = 32


@dataclass(frozen=True)
class LaneMasks:
    """Of one batch."""

    lanes: list[int]
    """Those whose choices have a grammar."""
    bits: npt.NDArray[np.int32]
    """[lanes, words]: bit t % 32 of word t // 32 is token t."""


_NONE = LaneMasks([], np.zeros((0, 0), np.int32))


class Masks:
    """Fills and applies them. Keeps nothing but a table."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = mask_words(vocab_size)
        self._vocab_size = vocab_size
        self._device = device

    def fill(self, batches: Sequence[Sequence[ChoiceSampling]]) -> list[LaneMasks]:
        """What the choices of each batch's lanes may write next."""
        lanes = [[lane for lane, state in enumerate(states) if state.matcher is not None] for states in batches]
        constrained = [states[lane] for states, chosen in zip(batches, lanes, strict=True) for lane in chosen]
        if not constrained:
            return [_NONE] * len(batches)
        bits = np.zeros((len(constrained), self._words), np.int32)
        self._fill(constrained, bits)
        ends = np.cumsum([len(chosen) for chosen in lanes])
        return [LaneMasks(chosen, part) for chosen, part in zip(lanes, np.split(bits, ends[:-1]), strict=True)]

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

    def _fill(self, states: Sequence[ChoiceSampling], bits: npt.NDArray[np.int32]) -> None:
        failed = fill_masks([state.matcher for state in states if state.matcher is not None], bits)
        for row, error in failed.items():
            states[row].fail(error.message)
        for row, state in enumerate(states):
            _take_endings(bits[row], state, self._vocab_size)
        for row in np.flatnonzero(~bits.any(1)).tolist():
            states[row].fail("its grammar allows no token here, not even the end")
        for row, state in enumerate(states):
            if state.failure is not None:
                bits[row] = 0

    @cached_property
    def _table(self) -> torch.Tensor:
        """[256, 8] float32: for each byte, what is added to the logits of its eight tokens."""
        allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        return uploaded(np.where(allowed, np.float32(0), np.float32(-np.inf)), self._device)


def _take_endings(bits: npt.NDArray[np.int32], state: ChoiceSampling, vocab_size: int) -> None:
    """Takes out of a row what is not to end its choice yet; where the grammar allows nothing else, it may."""
    ids = [token_id for token_id in state.forbidden_ids() if token_id < vocab_size and _allows(bits, token_id)]
    if not ids:
        return
    left = bits.copy()
    words = left.view(np.uint32)
    for token_id in ids:
        words[token_id // _WORD] &= ~np.uint32(1 << (token_id % _WORD))
    if left.any():
        bits[:] = left


def _allows(bits: npt.NDArray[np.int32], token_id: int) -> bool:
    return bool(int(bits[token_id // _WORD]) >> (token_id % _WORD) & 1)
