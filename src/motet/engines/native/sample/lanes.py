"""Sorts the choices of a step into batches of lanes that are drawn from by one set of operations.

A lane is one distribution: a row of logits under one set of parameters. The n choices of a group that draw their first
token from the same row share a lane; a choice whose own past changes its logits has a lane to itself. No token depends
on which lanes share a batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby

import msgspec

from motet.engines.native.sample.edits import has_edits
from motet.engines.native.sample.state import ChoiceSampling
from motet.types import SamplingParams


class SampleRow(msgspec.Struct, frozen=True):
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


@dataclass(slots=True)
class Lane:
    logits_row: int
    state: ChoiceSampling
    """Of the first choice; those of the others say the same."""
    kind: Kind
    leaders: int
    """How many leaders to look at; 0 where none are needed."""
    choices: list[int] = field(default_factory=list)
    """Places in the step's list of draws."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Lanes of one kind that look at equally many leaders."""

    kind: Kind
    leaders: int
    lanes: tuple[Lane, ...]
    vocab_size: int

    @property
    def choices(self) -> list[int]:
        return [choice for lane in self.lanes for choice in lane.choices]

    @property
    def lane_of_choice(self) -> list[int]:
        return [place for place, lane in enumerate(self.lanes) for _ in lane.choices]


def plan_batches(
    rows: Sequence[SampleRow], choices: Iterable[int], *, vocab_size: int, widths: Sequence[int], max_lanes: int
) -> list[Batch]:
    """Batches of at most `max_lanes` lanes for the given places of `rows`.

    `widths` are the numbers of leaders to choose from, rising; the last one is the vocabulary's size.
    """
    lanes: dict[tuple[int, int], Lane] = {}
    for choice in choices:
        row = rows[choice]
        owner = row.state if has_edits(row.state) else row.state.params
        key = (row.logits_row, id(owner))
        if key not in lanes:
            kind, leaders = _work(row.state.params, vocab_size, widths)
            lanes[key] = Lane(row.logits_row, row.state, kind, leaders)
        lanes[key].choices.append(choice)
    by_work = sorted(lanes.values(), key=_work_order)
    batches = []
    for (kind, leaders), same in groupby(by_work, key=_work_order):
        run = tuple(same)
        starts = range(0, len(run), max_lanes)
        batches += [Batch(kind, leaders, run[start : start + max_lanes], vocab_size) for start in starts]
    return batches


def _work(params: SamplingParams, vocab_size: int, widths: Sequence[int]) -> tuple[Kind, int]:
    if params.greedy:
        return Kind.GREEDY, 0
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    if top_k == 0 and params.top_p >= 1.0:
        return Kind.OPEN, 0
    return Kind.FILTERED, next(width for width in widths if width >= top_k)


def _work_order(lane: Lane) -> tuple[Kind, int]:
    return lane.kind, lane.leaders
