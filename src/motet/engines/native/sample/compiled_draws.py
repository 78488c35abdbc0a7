"""Draws by the compiled kernels (`csrc/draws.h`). On the CPU only.

Choices whose logits nothing changes, which is most of them, are drawn straight from a step's logits and scored by them,
all in one call. After a pass over the weights of a model nothing else is left in the caches, so what counts is how
little code and memory a draw needs. The others have their logits changed by torch, and are drawn lane by lane.
"""

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.compiled_kernels import Drawing, library
from motet.engines.native.sample.filters import Filters, TorchFilters
from motet.engines.native.sample.lanes import COLDEST, LaneParams, Sampled, SampleRow, at_temperature
from motet.engines.native.sample.top_logprobs import named_ids, unpack
from motet.types import LogprobsMode, SamplingParams

_NOT_SCORED = -1


def filters_for(vocab_size: int, device: torch.device) -> Filters:
    """Returns the compiled draws if they can be used, else torch's filters. Both draw the same tokens, except where a
    uniform is within rounding of a border between two."""
    kernels = library() if device.type == "cpu" else None
    return TorchFilters(vocab_size) if kernels is None else CompiledDraws(vocab_size, kernels)


@dataclass(frozen=True)
class _Choices:
    """The draws of a call. Each array is [choices]."""

    rows: npt.NDArray[np.int64]
    """The row of logits of each."""
    temperature: npt.NDArray[np.float32]
    """0: greedy"""
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    log_min_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64] | None
    """None: that of `seeds` and `positions`."""
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint64]
    best: npt.NDArray[np.int32]
    """How many of the best tokens are scored beside the drawn one; `_NOT_SCORED`: nothing is."""
    named: npt.NDArray[np.int64]
    """[choices, m]: tokens that are scored too."""


@dataclass(frozen=True)
class _SampledTokens:
    token_ids: npt.NDArray[np.int64]
    """[choices]"""
    finite: npt.NDArray[np.bool_]
    last: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
    """The last token that top-k and top-p keep, [choices]: its logit, and its id."""
    scores: npt.NDArray[np.float64]
    """[choices, 2 + m + 2k] as of `token_logprobs`; no rows if nothing was scored."""


class CompiledDraws:
    """Also filters for lanes. A lane is looked at as a whole, so none is drawn again.

    Whether a choice is drawn straight from the logits depends on nothing but the choice, so its company changes no bit.
    """

    def __init__(self, vocab_size: int, kernels: ctypes.CDLL) -> None:
        self.widths = (vocab_size,)
        self._vocab_size = vocab_size
        self._draw = kernels.motet_draw
        self._handle = kernels.motet_open_draws(vocab_size, torch.get_num_threads())
        self._close = weakref.finalize(self, kernels.motet_close_draws, self._handle)

    def straight(self, rows: Sequence[SampleRow]) -> list[int]:
        """Returns the places of the choices that are drawn straight from the logits."""
        return [
            place
            for place, row in enumerate(rows)
            if not row.state.has_edits
            and (row.state.params.logprobs is None or row.state.params.logprobs_mode is LogprobsMode.RAW)
        ]

    def draw_straight(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Iterator[Sampled]:
        """Draws one token a row, in their order, from `logits` [any, vocabulary]."""
        asked = [row.state.params for row in rows]
        if all(params is asked[0] for params in asked):  # as in a group
            numbers = np.array([self._numbers(asked[0])]).repeat(len(asked), 0)
        else:
            numbers = np.array([self._numbers(params) for params in asked])
        temperature, top_k, top_p, log_min_p, best = numbers.T
        choices = _Choices(
            rows=np.array([row.logits_row for row in rows], np.int64),
            temperature=temperature.astype(np.float32),
            top_k=top_k.astype(np.int64),
            top_p=np.ascontiguousarray(top_p),
            log_min_p=log_min_p.astype(np.float32),
            uniform=None,
            seeds=np.array([row.state.seed for row in rows], np.uint64),
            positions=np.array([row.position for row in rows], np.uint64),
            best=best.astype(np.int32),
            named=named_ids(asked),
        )
        if (
            logits.dtype != torch.float32
        ):  # only the rows that are drawn from: there may be those of a prompt beside them
            used, places = np.unique(choices.rows, return_inverse=True)
            logits, choices = logits[torch.from_numpy(used)].float(), replace(choices, rows=places)
        drawn = self._run(logits.contiguous(), choices)
        token_ids, finite = drawn.token_ids.tolist(), drawn.finite.tolist()
        if not len(drawn.scores):
            return map(Sampled, token_ids, [None] * len(rows), finite)
        num_named = choices.named.shape[1]
        logprobs = (
            unpack(token_id, scores, k=params.logprobs, named=params.logprob_token_ids, num_named=num_named)
            if params.logprobs is not None and sound
            else None
            for token_id, scores, params, sound in zip(token_ids, drawn.scores.tolist(), asked, finite, strict=True)
        )
        return map(Sampled, token_ids, logprobs, finite)

    def _numbers(self, params: SamplingParams) -> tuple[float, ...]:
        """Returns temperature, top-k, top-p, the logarithm of min-p, and the number of the best tokens to be scored."""
        return (
            0.0 if params.greedy else max(params.temperature, COLDEST),
            params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            _NOT_SCORED if params.logprobs is None else min(params.logprobs, self._vocab_size),
        )

    def draw(
        self,
        x: torch.Tensor,
        settings: LaneParams,
        *,
        k: int,
        lanes: torch.Tensor,
        uniform: torch.Tensor,
        spare: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = self._run_lanes(x, settings, lanes=lanes, uniform=uniform.numpy())
        return torch.from_numpy(drawn.token_ids), torch.ones(len(lanes), dtype=torch.bool)

    def keep(self, x: torch.Tensor, settings: LaneParams, *, k: int, spare: torch.Tensor) -> None:
        drawn = self._run_lanes(x, settings, lanes=torch.arange(len(x)), uniform=np.zeros(len(x)))
        last_logit, last_id = (torch.from_numpy(array).unsqueeze(1) for array in drawn.last)
        dropped = (x < last_logit) | ((x == last_logit) & (torch.arange(x.shape[1]) > last_id))
        at_temperature(x, settings)
        x.masked_fill_(dropped, -torch.inf)

    def _run_lanes(
        self, x: torch.Tensor, settings: LaneParams, *, lanes: torch.Tensor, uniform: npt.NDArray[np.float64]
    ) -> _SampledTokens:
        """`x` stays as it is."""
        choices = _Choices(
            rows=lanes.numpy(),
            temperature=settings.temperature[lanes, 0].numpy(),
            top_k=settings.top_k[lanes, 0].numpy(),
            top_p=settings.top_p[lanes, 0].numpy(),
            log_min_p=settings.log_min_p[lanes, 0].numpy(),
            uniform=uniform,
            seeds=np.empty(0, np.uint64),
            positions=np.empty(0, np.uint64),
            best=np.full(len(lanes), _NOT_SCORED, np.int32),
            named=np.empty((len(lanes), 0), np.int64),
        )
        return self._run(x, choices)

    def _run(self, logits: torch.Tensor, choices: _Choices) -> _SampledTokens:
        """`logits` [any, stride] float32, contiguous"""
        count, num_named = choices.named.shape
        most = int(choices.best.max(initial=_NOT_SCORED))
        scores = np.empty((count if most > _NOT_SCORED else 0, 2 + num_named + 2 * max(most, 0)))
        drawn = _SampledTokens(
            np.empty(count, np.int64),
            np.empty(count, np.bool_),
            (np.empty(count, np.float32), np.empty(count, np.int64)),
            scores,
        )
        arrays = (
            choices.rows,
            choices.temperature,
            choices.top_k,
            choices.top_p,
            choices.log_min_p,
            choices.uniform,
            choices.seeds,
            choices.positions,
            choices.best,
            choices.named,
            drawn.token_ids,
            drawn.finite,
            *drawn.last,
            scores,
        )
        sizes = count, self._vocab_size, logits.shape[1], max(most, 0), num_named
        step = Drawing(*sizes, logits.data_ptr(), *(None if array is None else array.ctypes.data for array in arrays))
        self._draw(self._handle, ctypes.byref(step))
        return drawn
