"""Sampling with the compiled kernels (`csrc/sampling.h`), on the CPU only.

Choices whose logits are not modified, which are most choices, are sampled and scored directly from a step's logits in
one call. A forward pass over a model's weights evicts everything else from the CPU's caches, so the time of this call
depends on the amount of code and memory that it touches. The logits of all other choices are modified by torch's
operators, and then sampled lane by lane.
"""

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motet.engines.native.compiled_kernels import SamplingArguments, library
from motet.engines.native.sample.filters import Filters, TorchFilters
from motet.engines.native.sample.lanes import FilterParams, LaneParams, Sampled, SampleRow, apply_temperature
from motet.engines.native.sample.top_logprobs import named_ids, unpack
from motet.types import LogprobsMode, SamplingParams, TokenLogprob

_NOT_SCORED = -1


def filters_for(vocab_size: int, device: torch.device) -> Filters:
    """Returns the compiled implementation if it can be used, else the implementation with torch's operators. Both
    sample the same tokens, except where a uniform is within rounding error of the border between two tokens."""
    kernels = library() if device.type == "cpu" else None
    return TorchFilters(vocab_size) if kernels is None else CompiledSampling(vocab_size, kernels)


class _Choices(NamedTuple):
    """The choices to sample in one call, in the order of `SamplingArguments`. Arrays are [choices], except `named`."""

    rows: npt.NDArray[np.int64]
    """Row of logits of each choice."""
    temperature: npt.NDArray[np.float32]
    """0 for greedy choices."""
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    log_min_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64] | None
    """Uniforms. If None, the kernels compute them from `seeds` and `positions`."""
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint64]
    num_top: npt.NDArray[np.int32]
    """Number of top tokens that are scored in addition to the sampled token. `_NOT_SCORED` if no token is scored."""
    named: npt.NDArray[np.int64]
    """[choices, m]: tokens that are scored in addition to the sampled token."""
    given: npt.NDArray[np.int64] | None = None
    """Tokens that are scored instead of sampled tokens."""


class _SampledTokens(NamedTuple):
    """Results of one call, in the order of `SamplingArguments`. Each array is [choices], except `scores`."""

    token_ids: npt.NDArray[np.int64]
    finite: npt.NDArray[np.bool_]
    """False if the choice's logits are not a distribution."""
    last_logit: npt.NDArray[np.float32]
    """Logit of the last token that top-k and top-p keep."""
    last_id: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    """[choices, 2 + m + 2k] with the columns of `token_logprobs`; no rows if nothing was scored."""


class CompiledSampling:
    """Samples directly from a step's logits; also implements `Filters` for the lanes of all other choices.

    The candidates of a lane are always the complete vocabulary, so no lane is sampled again. Only the choice itself
    determines whether it is sampled directly, so the other choices of a step cannot change any bit of its results."""

    def __init__(self, vocab_size: int, kernels: ctypes.CDLL) -> None:
        self.widths = (vocab_size,)
        self._vocab_size = vocab_size
        self._sample = kernels.motet_sample
        self._handle = kernels.motet_open_sampler(vocab_size, torch.get_num_threads())
        self._close = weakref.finalize(self, kernels.motet_close_sampler, self._handle)

    def directly_sampled(self, rows: Sequence[SampleRow]) -> list[int]:
        """Returns the indices of the choices that are sampled directly from the logits."""
        return [
            index
            for index, row in enumerate(rows)
            if not row.state.has_edits
            and (row.state.params.logprobs is None or row.state.params.logprobs_mode is LogprobsMode.RAW)
        ]

    def sample_directly(self, logits: Tensor, rows: Sequence[SampleRow]) -> Iterator[Sampled]:
        """Samples one token for each of `rows`, in their order. `logits` [any, vocab_size] have any float dtype."""
        params_of = [row.state.params for row in rows]
        choices = self._choices(rows, params_of)
        if logits.dtype != torch.float32:
            # Convert only the rows that are sampled from; the step can have other rows, for a prompt.
            used, places = np.unique(choices.rows, return_inverse=True)
            logits, choices = logits[torch.from_numpy(used)].float(), choices._replace(rows=places)
        sampled = self._run(logits.contiguous(), choices)
        token_ids, finite = sampled.token_ids.tolist(), sampled.finite.tolist()
        if not len(sampled.scores):
            return map(Sampled, token_ids, [None] * len(rows), finite)
        num_named = choices.named.shape[1]
        logprobs = (
            unpack(token_id, scores, k=params.logprobs, named=params.logprob_token_ids, num_named=num_named)
            if params.logprobs is not None and is_finite
            else None
            for token_id, scores, params, is_finite in zip(
                token_ids, sampled.scores.tolist(), params_of, finite, strict=True
            )
        )
        return map(Sampled, token_ids, logprobs, finite)

    def score(self, logits: Tensor, target_ids: Sequence[int], *, k: int, named: Sequence[int]) -> list[TokenLogprob]:
        """Returns the same as `prompt_logprobs`. The log-probability of a row that is not a distribution is NaN."""
        count, k = len(target_ids), min(k, self._vocab_size)
        choices = _Choices(
            rows=np.arange(count, dtype=np.int64),
            temperature=np.zeros(count, np.float32),
            top_k=np.full(count, self._vocab_size, np.int64),
            top_p=np.ones(count),
            log_min_p=np.full(count, -np.inf, np.float32),
            uniform=None,
            seeds=np.zeros(count, np.uint64),
            positions=np.zeros(count, np.uint64),
            num_top=np.full(count, k, np.int32),
            named=np.tile(np.array(named, np.int64), (count, 1)),
            given=np.array(target_ids, np.int64),
        )
        scored = self._run(logits.float().contiguous(), choices)
        return [
            unpack(token_id, scores, k=k, named=named, num_named=len(named))
            if is_finite
            else TokenLogprob(token_id, math.nan, 1)
            for token_id, scores, is_finite in zip(
                target_ids, scored.scores.tolist(), scored.finite.tolist(), strict=True
            )
        ]

    def _choices(self, rows: Sequence[SampleRow], params_of: Sequence[SamplingParams]) -> _Choices:
        """Returns the choices of `rows`, whose parameters are `params_of`. The parameters of a group are prepared once,
        because its choices share one object."""
        one_group = all(params is params_of[0] for params in params_of)
        different = params_of[:1] if one_group else params_of
        repeats = len(params_of) if one_group else 1
        filters = [FilterParams.of(params, vocab_size=self._vocab_size) for params in different]
        temperature = [0.0 if p.greedy else f.temperature for p, f in zip(different, filters, strict=True)]
        num_top = [_NOT_SCORED if p.logprobs is None else min(p.logprobs, self._vocab_size) for p in different]
        return _Choices(
            rows=np.array([row.logits_row for row in rows], np.int64),
            temperature=np.array(temperature * repeats, np.float32),
            top_k=np.array([f.top_k for f in filters] * repeats, np.int64),
            top_p=np.array([f.top_p for f in filters] * repeats, np.float64),
            log_min_p=np.array([f.log_min_p for f in filters] * repeats, np.float32),
            uniform=None,
            seeds=np.array([row.state.seed for row in rows], np.uint64),
            positions=np.array([row.position for row in rows], np.uint64),
            num_top=np.array(num_top * repeats, np.int32),
            named=named_ids(params_of),
        )

    def sample(
        self, x: Tensor, lane_params: LaneParams, *, k: int, lanes: Tensor, uniform: Tensor, spare: Tensor
    ) -> tuple[Tensor, Tensor]:
        sampled = self._run_lanes(x, lane_params, lanes=lanes, uniform=uniform.numpy())
        return torch.from_numpy(sampled.token_ids), torch.ones(len(lanes), dtype=torch.bool)

    def filter_logits(self, x: Tensor, lane_params: LaneParams, *, k: int, spare: Tensor) -> None:
        sampled = self._run_lanes(x, lane_params, lanes=torch.arange(len(x)), uniform=np.zeros(len(x)))
        last_logit, last_id = (torch.from_numpy(last).unsqueeze(1) for last in (sampled.last_logit, sampled.last_id))
        dropped = (x < last_logit) | ((x == last_logit) & (torch.arange(x.shape[1]) > last_id))
        apply_temperature(x, lane_params)
        x.masked_fill_(dropped, -torch.inf)

    def _run_lanes(
        self, x: Tensor, lane_params: LaneParams, *, lanes: Tensor, uniform: npt.NDArray[np.float64]
    ) -> _SampledTokens:
        """Samples choice i from lane `lanes[i]` of the logits `x` [lanes, width] float32, which are not modified."""
        choices = _Choices(
            rows=lanes.numpy(),
            temperature=lane_params.temperature[lanes, 0].numpy(),
            top_k=lane_params.top_k[lanes, 0].numpy(),
            top_p=lane_params.top_p[lanes, 0].numpy(),
            log_min_p=lane_params.log_min_p[lanes, 0].numpy(),
            uniform=uniform,
            seeds=np.empty(0, np.uint64),
            positions=np.empty(0, np.uint64),
            num_top=np.full(len(lanes), _NOT_SCORED, np.int32),
            named=np.empty((len(lanes), 0), np.int64),
        )
        return self._run(x, choices)

    def _run(self, logits: Tensor, choices: _Choices) -> _SampledTokens:
        """Calls the kernels. `logits` are [any, stride] float32 and contiguous."""
        count, num_named = choices.named.shape
        max_top = int(choices.num_top.max(initial=_NOT_SCORED))
        scores = np.empty((count if max_top > _NOT_SCORED else 0, 2 + num_named + 2 * max(max_top, 0)))
        sampled = _SampledTokens(
            token_ids=np.empty(count, np.int64),
            finite=np.empty(count, np.bool_),
            last_logit=np.empty(count, np.float32),
            last_id=np.empty(count, np.int64),
            scores=scores,
        )
        sizes = count, self._vocab_size, logits.shape[1], max(max_top, 0), num_named
        addresses = (None if array is None else array.ctypes.data for array in (*choices, *sampled))
        arguments = SamplingArguments(*sizes, logits.data_ptr(), *addresses)
        self._sample(self._handle, ctypes.byref(arguments))
        return sampled
