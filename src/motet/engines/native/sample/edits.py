"""What a choice changes in its logits before anything is drawn: forbidden tokens, bias, penalties, in this order.

What a grammar forbids is taken out before (`masks`), and with it what may not end a choice that has one. Each of these
touches a handful of tokens, so the tokens are gathered, changed and put back; nothing passes over the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.sample.state import ChoiceSampling
from motet.engines.native.sample.upload import uploaded


def apply_edits(x: torch.Tensor, states: Sequence[ChoiceSampling], vocab_size: int) -> None:
    """Changes the logits `x` [lanes, >= vocab_size] float32 in place; lane i belongs to `states[i]`.

    Ids outside the vocabulary (an end-of-sequence id the model has no logit for) cannot be drawn and are passed over.
    """
    _forbid(x, states, vocab_size)
    _bias(x, states, vocab_size)
    _penalise(x, states, vocab_size)


def _forbid(x: torch.Tensor, states: Sequence[ChoiceSampling], vocab_size: int) -> None:
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


def _bias(x: torch.Tensor, states: Sequence[ChoiceSampling], vocab_size: int) -> None:
    entries = [
        (lane, token_id, bias)
        for lane, state in enumerate(states)
        for token_id, bias in state.params.logit_bias.items()
        if token_id < vocab_size
    ]
    if entries:
        lanes, ids, bias = uploaded(np.array(entries, np.float64), x.device).unbind(1)
        lanes, ids = lanes.long(), ids.long()
        x[lanes, ids] = x[lanes, ids] + bias.float()


def _penalise(x: torch.Tensor, states: Sequence[ChoiceSampling], vocab_size: int) -> None:
    """Repetition (Keskar et al., CTRL, 2019) over prompt and answer; frequency and presence (OpenAI) over answers."""
    table = _penalty_table(states)
    if table is None:
        return
    lanes, ids, counts = uploaded(table[:, table[1] < vocab_size], x.device).unbind(0)
    strengths = [(s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty) for s in states]
    repetition, frequency, presence = uploaded(np.array(strengths, np.float32), x.device)[lanes].unbind(1)
    value = x[lanes, ids]
    value = torch.where(value > 0, value / repetition, value * repetition)
    x[lanes, ids] = value - frequency * counts - presence * (counts > 0)


def _penalty_table(states: Sequence[ChoiceSampling]) -> npt.NDArray[np.int64] | None:
    """[3, tokens]: lane, token id, count of every token that was seen; one array, so that one copy brings it over."""
    counted = [(lane, state.counts) for lane, state in enumerate(states) if state.counts is not None]
    if not counted:
        return None
    lengths = [len(counts.ids) for _, counts in counted]
    lanes = np.repeat(np.array([lane for lane, _ in counted], np.int64), lengths)
    ids = np.concatenate([counts.ids for _, counts in counted])
    return np.stack([lanes, ids, np.concatenate([counts.counts for _, counts in counted])])
