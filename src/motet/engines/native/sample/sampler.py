"""Samples the next token of every choice of a step, in a few operations over all choices.

A sampled token depends only on the bits of its row of logits and on the choice's parameters, previous tokens, seed and
position. Every operation in this folder therefore works row by row, and equal logits have a fixed order. Two
implementations, the compiled kernels and torch's operators, sample the same token, except for the rounding of weights.
A sampler uses one of them for all choices, so that a token does not depend on the information in the answer,
or on edits that change nothing. With the compiled kernels, all choices whose logits are not modified are sampled in one
call (`compiled_sampling`). All other choices are sampled in four steps:

1. Choices are assigned to lanes (one distribution each), and lanes to batches of one kind (`lanes`).
2. A batch's logits are copied as float32 to scratch memory and changed by grammars, bias and penalties (`edits`).
3. Greedy lanes take the token with the highest logit. The logits of other lanes become weights. Top-k, top-p and min-p
   remove some tokens (`filters`), and one uniform per choice (`philox`) selects a token by the inverse CDF
   (`candidates`).
4. Tokens, flags and log-probabilities are copied to the host together. Without the compiled kernels, lanes for which
   top-p needs more candidates are sampled again with more candidates, finally with the complete vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motet.engines.native.sample.candidates import sample_dense, top_tokens
from motet.engines.native.sample.compiled_sampling import CompiledSampling, filters_for
from motet.engines.native.sample.edits import GrammarMasks, LaneMasks, LogitsScratch, apply_edits
from motet.engines.native.sample.filters import Filters
from motet.engines.native.sample.lanes import (
    LaneBatch,
    LaneKind,
    LaneParams,
    LaneParamsCache,
    Sampled,
    SampleRow,
    apply_temperature,
    plan_batches,
    softmax,
    uploaded,
    uploaded_ids,
)
from motet.engines.native.sample.philox import uniforms
from motet.engines.native.sample.top_logprobs import named_ids, prompt_logprobs, score, token_logprobs, unpack
from motet.types import LogprobsMode, TokenLogprob


class Sampler:
    """Samples tokens on one device. Between steps it keeps only scratch memory and the last group's lane parameters."""

    def __init__(self, vocab_size: int, device: torch.device, *, filters: Filters | None = None) -> None:
        """Without `filters`, the fastest implementation for the device is used."""
        self._vocab_size = vocab_size
        self._device = device
        self._filters = filters or filters_for(vocab_size, device)
        self._compiled = self._filters if isinstance(self._filters, CompiledSampling) else None
        self._scratch = LogitsScratch(vocab_size, device)
        self._lane_params_cache = LaneParamsCache(vocab_size, device)
        self._masks = GrammarMasks(vocab_size, device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Samples one token for each of `rows`, in order. Only reads `logits` [any, vocab_size], of any float dtype."""
        done: dict[int, Sampled] = {}  # by index in `rows`
        if self._compiled and (unmodified := self._compiled.directly_sampled(rows)):
            sampled = self._compiled.sample_directly(logits, [rows[index] for index in unmodified])
            if len(unmodified) == len(rows):
                return list(sampled)
            done = dict(zip(unmodified, sampled, strict=True))
        uniform = _uniforms(rows)
        for level in range(len(self._filters.widths)):
            pending = [choice for choice in range(len(rows)) if choice not in done]
            if not pending:
                break
            widths = self._filters.widths[level:]
            batches = plan_batches(rows, pending, widths=widths, max_lanes=self._scratch.capacity)
            done |= self._attempt(logits, rows, batches=batches, uniform=uniform)
        return [done[choice] for choice in range(len(rows))]

    def score(self, logits: Tensor, target_ids: Sequence[int], *, k: int, named: Sequence[int]) -> list[TokenLogprob]:
        """Returns the scores of given tokens (`prompt_logprobs`)."""
        compute = prompt_logprobs if self._compiled is None else self._compiled.score
        return compute(logits, target_ids, k=k, named=named)

    def _attempt(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        *,
        batches: Sequence[LaneBatch],
        uniform: npt.NDArray[np.float64],
    ) -> dict[int, Sampled]:
        """Samples all choices of `batches`. Returns results by index in `rows`, of choices with enough candidates."""
        order = [choice for batch in batches for choice in batch.choices]
        masks = [self._masks.fill([lane.state for lane in batch.lanes]) for batch in batches]
        sampled = self._sample_batches(logits, batches, masks=masks, uniform=uploaded(uniform[order], self._device))
        scored = [place for place, choice in enumerate(order) if rows[choice].state.params.logprobs is not None]
        params_of_scored = [rows[order[place]].state.params for place in scored]
        named = uploaded(named_ids(params_of_scored), self._device)
        scores = sampled.new_empty(0, 2)
        if scored:
            k = max(params.logprobs or 0 for params in params_of_scored)
            request = _LogprobRequest(scored, sampled[:, 0].long(), named, min(k, logits.shape[1]))
            scores = self._score(logits, rows, request=request, batches=batches, masks=masks)
        token_ids, finite, enough, score_rows = _to_host(sampled, scores)
        logprobs = {
            place: unpack(
                token_ids[place], row, k=params.logprobs or 0, named=params.logprob_token_ids, num_named=named.shape[1]
            )
            for place, params, row in zip(scored, params_of_scored, score_rows, strict=True)
            if finite[place]
        }
        return {
            choice: Sampled(token_ids[place], logprobs.get(place), finite[place])
            for place, choice in enumerate(order)
            if enough[place] or not finite[place]
        }

    def _score(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        *,
        request: "_LogprobRequest",
        batches: Sequence[LaneBatch],
        masks: Sequence[LaneMasks],
    ) -> Tensor:
        """Returns the rows of `token_logprobs` for `request.places`, in their order."""
        order = [choice for batch in batches for choice in batch.choices]
        processed = {
            place for place in request.places if rows[order[place]].state.params.logprobs_mode is LogprobsMode.PROCESSED
        }
        raw = [place for place in request.places if place not in processed]
        parts = []
        if raw:
            token_ids, named = request.at(raw)
            raw_rows = [rows[order[place]].logits_row for place in raw]
            parts.append(
                token_logprobs(self._scratch, logits, rows=raw_rows, token_ids=token_ids, named=named, k=request.k)
            )
        if not processed:
            return parts[0]
        places, first = raw, 0
        for batch, allowed in zip(batches, masks, strict=True):
            in_batch = [place for place in range(first, first + len(batch.choices)) if place in processed]
            if in_batch:
                x = self._processed(logits, batch, allowed=allowed)
                token_ids, named = request.at(in_batch)
                lanes = [batch.lane_of_choice[place - first] for place in in_batch]
                scored = score(
                    x,
                    uploaded_ids(lanes, self._device),
                    token_ids,
                    one_each=lanes == list(range(len(x))),
                    named=named,
                    k=request.k,
                    spare=self._scratch.spare_like(x),
                )
                parts.append(scored)
                places = places + in_batch
            first += len(batch.choices)
        order_of_places = np.argsort(places)  # `request.places` are ascending
        return torch.cat(parts)[uploaded(order_of_places, self._device)]

    def _sample_batches(
        self, logits: Tensor, batches: Sequence[LaneBatch], *, masks: Sequence[LaneMasks], uniform: Tensor
    ) -> Tensor:
        """Returns the results of `_sample_batch` for all batches, concatenated."""
        parts = []
        first = 0
        for batch, allowed in zip(batches, masks, strict=True):
            x = self._edited(logits, batch, allowed=allowed)
            last = first + len(batch.choices)
            parts.append(
                self._sample_batch(batch, x, lane_params=self._lane_params(batch), uniform=uniform[first:last])
            )
            first = last
        return torch.cat(parts)

    def _lane_params(self, batch: LaneBatch) -> LaneParams:
        return self._lane_params_cache.make([lane.state.params for lane in batch.lanes])

    def _edited(self, logits: Tensor, batch: LaneBatch, *, allowed: LaneMasks) -> Tensor:
        """Returns the logits of a batch after grammars, bias and penalties, in scratch memory."""
        x = self._scratch.load(logits, [lane.logits_row for lane in batch.lanes])
        if any(lane.has_edits for lane in batch.lanes):
            self._masks.apply(x, allowed, spare=self._scratch.spare_like(x))
            apply_edits(x, [lane.state for lane in batch.lanes], vocab_size=self._vocab_size)
        return x

    def _processed(self, logits: Tensor, batch: LaneBatch, *, allowed: LaneMasks) -> Tensor:
        """Returns the logits from which the tokens of a batch are sampled, in scratch memory. Temperature and filters
        do not apply to greedy lanes."""
        x = self._edited(logits, batch, allowed=allowed)
        if batch.kind is LaneKind.UNFILTERED:
            apply_temperature(x, self._lane_params(batch))
        elif batch.kind is LaneKind.FILTERED:
            spare = self._scratch.spare_like(x)
            self._filters.filter_logits(x, self._lane_params(batch), k=batch.num_candidates, spare=spare)
        return x

    def _sample_batch(self, batch: LaneBatch, x: Tensor, *, lane_params: LaneParams, uniform: Tensor) -> Tensor:
        """Samples one token for each choice of the batch, on the device and without waiting for it.

        `x` [lanes, padded vocabulary] float32 are the batch's logits after edits, and are overwritten. `uniform` is
        [choices] float64. Returns [choices, 3] float64, which represents all values exactly: the token id; 1 if the
        lane's logits are a distribution, else 0; 1 if there were enough candidates, else 0: sample again with more."""
        lane_of_choice, spare = uploaded_ids(batch.lane_of_choice, x.device), self._scratch.spare_like(x)
        finite = x.amax(-1).isfinite()[lane_of_choice]
        enough = torch.ones_like(finite)
        if batch.kind is LaneKind.GREEDY:
            token_ids = top_tokens(x, 1).squeeze(1)[lane_of_choice]
        elif batch.kind is LaneKind.UNFILTERED and self._compiled is None:
            token_ids = sample_dense(softmax(x, lane_params, with_min_p=True, out=spare), lane_of_choice, uniform)
        else:
            token_ids, enough = self._filters.sample(
                x, lane_params, k=batch.num_candidates, lanes=lane_of_choice, uniform=uniform, spare=spare
            )
        return torch.stack([token_ids.double(), finite.double(), enough.double()], dim=1)


@dataclass(frozen=True)
class _LogprobRequest:
    """The log-probabilities that the choices of an attempt requested."""

    places: Sequence[int]  # indices of these choices in the attempt, ascending
    token_ids: Tensor  # [choices of the attempt] int64: the sampled tokens
    named: Tensor  # [places, m] int64: other tokens whose log-probabilities were requested by id
    k: int  # number of top tokens per choice

    def at(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the sampled tokens [places] and the named tokens [places, m] of some of `self.places`."""
        token_ids = self.token_ids[uploaded_ids(places, self.token_ids.device)]
        if len(places) == len(self.places):
            return token_ids, self.named
        number = {place: number for number, place in enumerate(self.places)}
        return token_ids, self.named[uploaded_ids([number[place] for place in places], self.named.device)]


def _uniforms(rows: Sequence[SampleRow]) -> npt.NDArray[np.float64]:
    """Returns one uniform per row, [rows] float64: zeros if all rows are greedy, which need none."""
    if all(row.state.params.greedy for row in rows):
        return np.zeros(len(rows))
    seeds = np.array([row.state.seed for row in rows], np.uint64)
    return uniforms(seeds, np.array([row.position for row in rows], np.uint64))


def _to_host(sampled: Tensor, scores: Tensor) -> tuple[list[int], list[bool], list[bool], list[list[float]]]:
    """Copies the results of `_sample_batch` and the scores to the host in one transfer. Returns token ids, "finite"
    flags, "enough" flags, and rows of scores."""
    flat = torch.cat([sampled.flatten(), scores.flatten()]).cpu().numpy()  # `tolist` of numpy is faster than of torch
    token_ids, finite, enough = flat[: sampled.numel()].reshape(sampled.shape).T
    score_rows = flat[sampled.numel() :].reshape(scores.shape).tolist()
    return token_ids.astype(np.int64).tolist(), (finite != 0).tolist(), (enough != 0).tolist(), score_rows
