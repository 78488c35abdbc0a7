"""What a choice changes in its logits before anything is drawn: forbidden tokens, bias, penalties, in this order.

Each touches a handful of tokens, so the tokens are gathered, changed and put back; nothing passes over the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.sample.state import ChoiceSampling, TokenCounts


def has_edits(state: ChoiceSampling) -> bool:
    return state.counts is not None or bool(state.params.logit_bias) or bool(state.forbidden_ids())


def apply_edits(x: torch.Tensor, states: Sequence[ChoiceSampling], vocab_size: int) -> None:
    """Changes the logits `x` [lanes, >= vocab_size] float32 in place; lane i belongs to `states[i]`.

    Ids outside the vocabulary (an end-of-sequence id the model has no logit for) cannot be drawn and are passed over.
    """
    if not any(map(has_edits, states)):
        return
    _forbid(x, states, vocab_size)
    _bias(x, states, vocab_size)
    _penalise(x, states, vocab_size)


def _forbid(x: torch.Tensor, states: Sequence[ChoiceSampling], vocab_size: int) -> None:
    entries = [
        (lane, token_id)
        for lane, state in enumerate(states)
        for token_id in state.forbidden_ids()
        if token_id < vocab_size
    ]
    if entries:
        lanes, ids = torch.tensor(entries, device=x.device).unbind(1)
        x[lanes, ids] = -torch.inf


def _bias(x: torch.Tensor, states: Sequence[ChoiceSampling], vocab_size: int) -> None:
    entries = [
        (lane, token_id, bias)
        for lane, state in enumerate(states)
        for token_id, bias in state.params.logit_bias.items()
        if token_id < vocab_size
    ]
    if entries:
        lanes, ids, bias = torch.tensor(entries, dtype=torch.float64, device=x.device).unbind(1)
        lanes, ids = lanes.long(), ids.long()
        x[lanes, ids] = x[lanes, ids] + bias.float()


def _penalise(x: torch.Tensor, states: Sequence[ChoiceSampling], vocab_size: int) -> None:
    """Repetition (Keskar et al., CTRL, 2019) over prompt and answer; frequency and presence (OpenAI) over answers."""
    table = _penalty_table(states, vocab_size)
    if not table.size:
        return
    lanes, ids, counts, repetition, frequency, presence = torch.from_numpy(table).to(x.device).unbind(0)
    lanes, ids, repetition = lanes.long(), ids.long(), repetition.float()
    value = x[lanes, ids]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value = value - (frequency * counts).float() - (presence * (counts > 0)).float()
    x[lanes, ids] = value


def _penalty_table(states: Sequence[ChoiceSampling], vocab_size: int) -> npt.NDArray[np.float64]:
    """[6, tokens]: lane, token id, count, and the three penalties; one array, so that one copy brings it over."""
    parts = [_penalty_rows(lane, state, state.counts) for lane, state in enumerate(states) if state.counts is not None]
    if not parts:
        return np.empty((6, 0))
    table = np.concatenate(parts, axis=1)
    return table[:, table[1] < vocab_size]


def _penalty_rows(lane: int, state: ChoiceSampling, counts: TokenCounts) -> npt.NDArray[np.float64]:
    rows = np.empty((6, len(counts.ids)))
    rows[0], rows[1], rows[2] = lane, counts.ids, counts.counts
    params = state.params
    rows[3], rows[4], rows[5] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return rows
