"""Sorts the choices of a step into batches of lanes that are drawn from by one set of operations.

A lane is one distribution: a row of logits under one set of parameters. The n choices of a group that draw their first
token from the same row share a lane; a choice whose own past changes its logits, or what its grammar allows, has a lane
to itself. No token depends on which lanes share a batch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.sample.state import ChoiceSampling
from motet.types import SamplingParams, TokenLogprob


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """One draw: the next token of a choice."""

    logits_row: int
    """The row of the step's logits; several choices may have the same one."""
    state: ChoiceSampling
    position: int
    """Absolute position of the token to be drawn: prompt length + output tokens."""


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """The next token of one choice."""

    token_id: int
    logprob: TokenLogprob | None
    """None unless the choice asked for it and the logits are finite."""
    finite: bool = True
    """False: the logits held NaN or +inf, or only -inf; then `token_id` means nothing."""


class Kind(IntEnum):
    GREEDY = 0
    """The best token."""
    OPEN = 1
    """The whole vocabulary, less what min-p drops, which needs no order."""
    FILTERED = 2
    """The leaders that top-k, top-p and min-p keep."""


class Lane(msgspec.Struct, frozen=True, gc=False):
    logits_row: int
    state: ChoiceSampling
    """The state of its first choice; the others have equal ones."""
    has_edits: bool
    choices: list[int]
    """The indices of its choices in the step's list of draws."""


@dataclass(frozen=True, slots=True)
class LaneBatch:
    """Lanes of one kind that look at equally many leaders."""

    kind: Kind
    leaders: int
    lanes: tuple[Lane, ...]
    choices: tuple[int, ...]
    """The indices of its choices in the step's list of draws, lane by lane."""
    lane_of_choice: tuple[int, ...]
    """The lane of each of `choices`."""


def plan_batches(
    rows: Sequence[SampleRow], choices: Iterable[int], *, widths: Sequence[int], max_lanes: int
) -> list[LaneBatch]:
    """Returns batches of at most `max_lanes` lanes for the given places of `rows`. `widths` are the numbers of leaders
    to choose from, rising; the last one is the vocabulary's size."""
    by_work: dict[tuple[Kind, int], list[Lane]] = {}
    by_params: dict[int, list[Lane]] = {}  # the same lists; all choices of a group share their parameters
    lanes: dict[tuple[int, bool, int], Lane] = {}
    for choice in choices:
        row = rows[choice]
        state = row.state
        params, has_edits = state.params, state.has_edits
        # Siblings that have written nothing have the same edits.
        key = row.logits_row, has_edits, id(state if has_edits and state.num_written else params)
        if (lane := lanes.get(key)) is not None:
            lane.choices.append(choice)
            continue
        lanes[key] = lane = Lane(row.logits_row, state, has_edits, [choice])
        if (same := by_params.get(id(params))) is None:
            same = by_params[id(params)] = by_work.setdefault(_work(params, widths), [])
        same.append(lane)
    return [
        _batch(work, tuple(run[start : start + max_lanes]))
        for work, run in sorted(by_work.items(), key=itemgetter(0))
        for start in range(0, len(run), max_lanes)
    ]


def _batch(work: tuple[Kind, int], lanes: tuple[Lane, ...]) -> LaneBatch:
    choices = tuple(choice for lane in lanes for choice in lane.choices)
    lane_of_choice = tuple(place for place, lane in enumerate(lanes) for _ in lane.choices)
    return LaneBatch(*work, lanes, choices, lane_of_choice)


def _work(params: SamplingParams, widths: Sequence[int]) -> tuple[Kind, int]:
    if params.greedy:
        return Kind.GREEDY, 0
    top_k = params.top_k if 0 < params.top_k < widths[-1] else 0
    if top_k == 0 and params.top_p >= 1.0:
        return Kind.OPEN, 0
    return Kind.FILTERED, next(width for width in widths if width >= top_k)


COLDEST = torch.finfo(torch.float32).tiny
"""A colder temperature would be 0 in float32; at this one all but the best token have weight 0 already."""


@dataclass(frozen=True)
class LaneParams:
    """The sampling parameters of a batch of lanes, on the device. Each tensor is [lanes, 1]."""

    temperature: torch.Tensor
    """float32"""
    top_k: torch.Tensor
    """int64; the vocabulary's size where it is off"""
    top_p: torch.Tensor
    """float64; 1 where it is off"""
    log_min_p: torch.Tensor
    """float32; -inf where it is off"""
    all_plain: bool
    """True if every lane has temperature 1."""
    any_min_p: bool


class LaneParamsMaker:
    """Makes the parameters of a batch, in one copy to the device, and keeps those of the last batch that had one group,
    as most batches have: every copy costs."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._last: tuple[SamplingParams, int, LaneParams] | None = None

    def make(self, params: Sequence[SamplingParams]) -> LaneParams:
        """Returns the parameters of lanes of which lane i has `params[i]`; a group's lanes have one and the same."""
        first, lanes = params[0], len(params)
        if any(p is not first for p in params):
            return self._made(params)
        if self._last is None or self._last[0] is not first or self._last[1] != lanes:
            self._last = first, lanes, self._made(params)
        return self._last[2]

    def _made(self, params: Sequence[SamplingParams]) -> LaneParams:
        different = {id(p): p for p in params}
        place = {key: i for i, key in enumerate(different)}
        rows = np.array([self._row(p) for p in different.values()])[[place[id(p)] for p in params]]  # [lanes, 4]
        temperature, top_k, top_p, log_min_p = uploaded(rows, self._device).unsqueeze(1).unbind(2)
        return LaneParams(
            temperature=temperature.float(),
            top_k=top_k.long(),
            top_p=top_p,
            log_min_p=log_min_p.float(),
            all_plain=all(p.temperature == 1.0 for p in different.values()),
            any_min_p=any(p.min_p > 0.0 for p in different.values()),
        )

    def _row(self, params: SamplingParams) -> tuple[float, float, float, float]:
        return (
            max(params.temperature, COLDEST),
            params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        )


def softmax(x: torch.Tensor, settings: LaneParams, *, with_min_p: bool, out: torch.Tensor) -> torch.Tensor:
    """Writes the weights [lanes, width] float32 of the logits `x` at their temperature into `out`; may overwrite `x`.

    The best logit is taken off before the division, so that no temperature overflows. `with_min_p` leaves out what
    min-p drops: what it asks of a probability relative to the best one is an exact bound on the logit.
    """
    masked = with_min_p and settings.any_min_p
    if masked or not settings.all_plain:
        x.sub_(x.amax(-1, keepdim=True)).div_(settings.temperature)
    torch.softmax(x, -1, out=out)
    if masked:
        out.mul_(x.ge_(settings.log_min_p))  # a float mask; a boolean one takes ten times as long
    return out


def at_temperature(x: torch.Tensor, settings: LaneParams) -> None:
    """Turns the logits `x` [lanes, width] float32 into those from which `softmax` draws with min-p: less the best one,
    over temperature, and -inf for the tokens that min-p drops."""
    x.sub_(x.amax(-1, keepdim=True)).div_(settings.temperature)
    x.masked_fill_(x < settings.log_min_p, -torch.inf)


def uploaded(numbers: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Returns the array on the device, in its own dtype and shape, without waiting for the device's work.

    A copy from ordinary memory makes the host wait until everything launched before it is done: in the middle of a step
    that is the whole forward pass. From pinned memory, which torch keeps until then, the device copies by itself.
    """
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def uploaded_ids(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns [numbers] int64 on the device."""
    return uploaded(np.array(numbers, np.int64), device)
