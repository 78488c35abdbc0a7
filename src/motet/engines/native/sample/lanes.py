"""Sorts the choices of a step into lanes, and lanes into batches that are sampled by one set of operations.

A lane is one distribution: a row of logits with one set of sampling parameters. The n choices of a group that sample
their first token from the same row share a lane. A choice whose previous tokens change its logits, or the tokens that
its grammar allows, has a lane of its own. No sampled token depends on which lanes share a batch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motet.engines.native.sample.state import ChoiceSampling
from motet.types import SamplingParams, TokenLogprob


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """A token to be sampled: the next token of a choice."""

    logits_row: int
    """Row of the step's logits. Several choices can use the same row."""
    state: ChoiceSampling
    position: int
    """Absolute position of the token to be sampled: prompt length + output tokens."""


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """The next token of one choice."""

    token_id: int
    logprob: TokenLogprob | None
    """Log-probability of the token. None if it was not requested or the logits are not finite."""
    finite: bool = True
    """False if the logits contained NaN or +inf, or only -inf. `token_id` is then meaningless."""


class LaneKind(IntEnum):
    """Operations that sample from a lane."""

    GREEDY = 0
    """Takes the token with the highest logit."""
    UNFILTERED = 1
    """Samples from the complete vocabulary. Min-p can apply, because it needs no sorted tokens."""
    FILTERED = 2
    """Samples from the candidates that top-k, top-p and min-p keep."""


class Lane(msgspec.Struct, frozen=True, gc=False):
    """A row of logits with one set of sampling parameters, and the choices that sample from it."""

    logits_row: int
    state: ChoiceSampling
    """State of the lane's first choice. The states of its other choices are equal."""
    has_edits: bool
    choices: list[int]
    """Indices of the lane's choices in the step's list of `SampleRow`."""


@dataclass(frozen=True, slots=True)
class LaneBatch:
    """Lanes of one kind with the same number of candidates."""

    kind: LaneKind
    num_candidates: int
    """Number of top tokens of each lane that the filters examine; 0 unless `kind` is FILTERED."""
    lanes: tuple[Lane, ...]
    choices: tuple[int, ...]
    """Indices of the batch's choices in the step's list of `SampleRow`, lane by lane."""
    lane_of_choice: tuple[int, ...]
    """Index in `lanes` for each of `choices`."""


def plan_batches(
    rows: Sequence[SampleRow], choices: Iterable[int], *, widths: Sequence[int], max_lanes: int
) -> list[LaneBatch]:
    """Returns batches of at most `max_lanes` lanes for the choices with the given indices in `rows`. `widths` are the
    possible numbers of candidates, ascending; the last one is the vocabulary size."""
    by_kind: dict[tuple[LaneKind, int], list[Lane]] = {}
    by_params: dict[int, list[Lane]] = {}  # the same lists, by id; all choices of a group share their params
    lanes: dict[tuple[int, bool, int], Lane] = {}
    for choice in choices:
        row = rows[choice]
        state = row.state
        params, has_edits = state.params, state.has_edits
        # The choices of a group that have no output tokens yet have the same edits.
        key = row.logits_row, has_edits, id(state if has_edits and state.num_output_tokens else params)
        if (lane := lanes.get(key)) is not None:
            lane.choices.append(choice)
            continue
        lanes[key] = lane = Lane(row.logits_row, state, has_edits, [choice])
        if (same := by_params.get(id(params))) is None:
            same = by_params[id(params)] = by_kind.setdefault(_kind_and_width(params, widths), [])
        same.append(lane)
    return [
        _batch(kind_and_width, tuple(run[start : start + max_lanes]))
        for kind_and_width, run in sorted(by_kind.items(), key=itemgetter(0))
        for start in range(0, len(run), max_lanes)
    ]


def _batch(kind_and_width: tuple[LaneKind, int], lanes: tuple[Lane, ...]) -> LaneBatch:
    choices = tuple(choice for lane in lanes for choice in lane.choices)
    lane_of_choice = tuple(place for place, lane in enumerate(lanes) for _ in lane.choices)
    return LaneBatch(*kind_and_width, lanes, choices, lane_of_choice)


def _kind_and_width(params: SamplingParams, widths: Sequence[int]) -> tuple[LaneKind, int]:
    if params.greedy:
        return LaneKind.GREEDY, 0
    top_k = params.top_k if 0 < params.top_k < widths[-1] else 0
    if top_k == 0 and params.top_p >= 1.0:
        return LaneKind.UNFILTERED, 0
    return LaneKind.FILTERED, next(width for width in widths if width >= top_k)


MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Lower temperatures would be 0 in float32. At this one, all tokens below the highest logit already have weight 0."""


class FilterParams(NamedTuple):
    """Temperature and filters of a choice as the torch operators and the compiled kernels need them."""

    temperature: float
    """At least `MIN_TEMPERATURE`, even for greedy choices."""
    top_k: int
    """The vocabulary size where top-k is off."""
    top_p: float
    """1 where top-p is off."""
    log_min_p: float
    """Natural logarithm of min-p; -inf where min-p is off."""

    @classmethod
    def of(cls, params: SamplingParams, *, vocab_size: int) -> "FilterParams":
        return cls(
            temperature=max(params.temperature, MIN_TEMPERATURE),
            top_k=params.top_k if 0 < params.top_k < vocab_size else vocab_size,
            top_p=params.top_p,
            log_min_p=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        )


@dataclass(frozen=True)
class LaneParams:
    """The `FilterParams` of a batch of lanes, on the device. Each tensor is [lanes, 1]."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64
    top_p: Tensor  # float64
    log_min_p: Tensor  # float32
    all_unscaled: bool
    """True if every lane has temperature 1."""
    any_min_p: bool


class LaneParamsCache:
    """Makes the parameters of a batch with one copy to the device. Keeps the parameters of the last batch with a single
    group, because most batches have a single group and every copy takes time."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._last: tuple[SamplingParams, int, LaneParams] | None = None

    def make(self, params: Sequence[SamplingParams]) -> LaneParams:
        """Returns the parameters of lanes; lane i has `params[i]`. The lanes of a group share one object."""
        first, lanes = params[0], len(params)
        if any(p is not first for p in params):
            return self._made(params)
        if self._last is None or self._last[0] is not first or self._last[1] != lanes:
            self._last = first, lanes, self._made(params)
        return self._last[2]

    def _made(self, params: Sequence[SamplingParams]) -> LaneParams:
        different = {id(p): p for p in params}
        place = {key: i for i, key in enumerate(different)}
        filters = [FilterParams.of(p, vocab_size=self._vocab_size) for p in different.values()]
        rows = np.array(filters)[[place[id(p)] for p in params]]  # [lanes, 4] float64
        columns = dict(zip(FilterParams._fields, uploaded(rows, self._device).unsqueeze(1).unbind(2), strict=True))
        return LaneParams(
            temperature=columns["temperature"].float(),
            top_k=columns["top_k"].long(),
            top_p=columns["top_p"],
            log_min_p=columns["log_min_p"].float(),
            all_unscaled=all(p.temperature == 1.0 for p in different.values()),
            any_min_p=any(p.min_p > 0.0 for p in different.values()),
        )


def softmax(x: Tensor, lane_params: LaneParams, *, with_min_p: bool, out: Tensor) -> Tensor:
    """Stores the probabilities [lanes, width] float32 of the logits `x` at their temperature in `out`, and returns
    `out`. Can overwrite `x`. The maximum logit is subtracted before the division, so that no temperature overflows.
    With `with_min_p`, tokens that min-p removes have weight 0: min-p is a bound on the probability relative to the
    maximum, so it is an exact bound on the logit minus the maximum."""
    masked = with_min_p and lane_params.any_min_p
    if masked or not lane_params.all_unscaled:
        x.sub_(x.amax(-1, keepdim=True)).div_(lane_params.temperature)
    torch.softmax(x, -1, out=out)
    if masked:
        out.mul_(x.ge_(lane_params.log_min_p))  # a float mask; a boolean mask takes ten times as long
    return out


def apply_temperature(x: Tensor, lane_params: LaneParams) -> None:
    """Changes the logits `x` [lanes, width] float32 in place to the logits that `softmax` uses with `with_min_p`: minus
    the maximum, divided by the temperature, and -inf for the tokens that min-p removes."""
    x.sub_(x.amax(-1, keepdim=True)).div_(lane_params.temperature)
    x.masked_fill_(x < lane_params.log_min_p, -torch.inf)


def uploaded(numbers: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Returns the array on the device, with its dtype and shape, without waiting for the device's work.

    A copy from pageable memory blocks the host until all previously launched work is done; in the middle of a step this
    is the complete forward pass. A copy from pinned memory, which torch keeps until it is done, is asynchronous."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def uploaded_ids(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns `numbers` as [len(numbers)] int64 on the device."""
    return uploaded(np.array(numbers, np.int64), device)
