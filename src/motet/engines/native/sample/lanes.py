"""Sorts the choices of a step into batches of lanes that are drawn from by one set of operations.

A lane is one distribution: a row of logits under one set of parameters. The n choices of a group that draw their first
token from the same row share a lane; a choice whose own past changes its logits, or what its grammar allows, has a lane
to itself. No token depends on which lanes share a batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

import msgspec

from motet.engines.native.sample.state import ChoiceSampling
from motet.types import SamplingParams


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """One draw: the next token of a choice."""

    logits_row: int
    """Several choices may point to the same row."""
    state: ChoiceSampling
    position: int
    """Absolute position of the token to be drawn: prompt length + tokens written."""


class Kind(IntEnum):
    GREEDY = 0
    """The best token."""
    OPEN = 1
    """The whole vocabulary, but for min-p, which needs no order."""
    FILTERED = 2
    """The leaders that top-k, top-p and min-p keep."""


class Lane(msgspec.Struct, frozen=True, gc=False):
    logits_row: int
    state: ChoiceSampling
    """Of the first choice; those of the others say the same."""
    has_edits: bool
    choices: list[int]
    """Places in the step's list of draws."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Lanes of one kind that look at equally many leaders."""

    kind: Kind
    leaders: int
    lanes: tuple[Lane, ...]
    vocab_size: int
    choices: tuple[int, ...]
    """Lane by lane."""
    lane_of_choice: tuple[int, ...]
    """One entry for each of `choices`."""


def plan_batches(
    rows: Sequence[SampleRow], choices: Iterable[int], *, vocab_size: int, widths: Sequence[int], max_lanes: int
) -> list[Batch]:
    """Batches of at most `max_lanes` lanes for the given places of `rows`.

    `widths` are the numbers of leaders to choose from, rising; the last one is the vocabulary's size.
    """
    by_work: dict[tuple[Kind, int], list[Lane]] = {}
    by_params: dict[int, list[Lane]] = {}  # the same lists; all choices of a group share their parameters
    lanes: dict[tuple[int, bool, int], Lane] = {}
    for choice in choices:
        row = rows[choice]
        state = row.state
        params, has_edits = state.params, state.has_edits
        key = row.logits_row, has_edits, id(state if has_edits and not state.fresh else params)
        if (lane := lanes.get(key)) is not None:
            lane.choices.append(choice)
            continue
        lanes[key] = lane = Lane(row.logits_row, state, has_edits, [choice])
        if (same := by_params.get(id(params))) is None:
            same = by_params[id(params)] = by_work.setdefault(_work(params, vocab_size, widths), [])
        same.append(lane)
    return [
        _batch(work, tuple(run[start : start + max_lanes]), vocab_size)
        for work, run in sorted(by_work.items(), key=itemgetter(0))
        for start in range(0, len(run), max_lanes)
    ]


def _batch(work: tuple[Kind, int], lanes: tuple[Lane, ...], vocab_size: int) -> Batch:
    choices = tuple(choice for lane in lanes for choice in lane.choices)
    lane_of_choice = tuple(place for place, lane in enumerate(lanes) for _ in lane.choices)
    return Batch(*work, lanes, vocab_size, choices, lane_of_choice)


def _work(params: SamplingParams, vocab_size: int, widths: Sequence[int]) -> tuple[Kind, int]:
    if params.greedy:
        return Kind.GREEDY, 0
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    if top_k == 0 and params.top_p >= 1.0:
        return Kind.OPEN, 0
    return Kind.FILTERED, next(width for width in widths if width >= top_k)
