"""Draws the next token of every choice of a step, in a few operations over all of them.

A token depends on the bits of its row of logits, the choice's parameters and past, its seed and its position, and on
nothing else. So every operation here works row by row, equal logits have a fixed order, and every path finds the same
token, but for the rounding of weights. With the compiled kernels, choices whose logits nothing changes are drawn at
once (`compiled`). All others:

1. Choices become lanes (one distribution each), lanes become batches of one kind (`lanes`).
2. A batch's logits are copied as float32 into scratch memory and changed by grammars, bias and penalties (`edits`).
3. Greedy lanes take their best token. The others become weights, of which top-k, top-p and min-p keep some (`filters`),
   and one uniform a choice (`philox`) finds the token (`candidates`).
4. Tokens, flags and log-probabilities come to the host in one copy. Without the compiled kernels, lanes whose top-p
   needs more leaders are drawn again with more of them, in the end with all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.sample.candidates import draw_dense, leaders
from motet.engines.native.sample.compiled_draws import CompiledDraws, filters_for
from motet.engines.native.sample.edits import LaneMasks, LogitsScratch, Masks, apply_edits
from motet.engines.native.sample.filters import Filters
from motet.engines.native.sample.lanes import (
    Kind,
    LaneBatch,
    LaneParams,
    LaneParamsMaker,
    Sampled,
    SampleRow,
    at_temperature,
    plan_batches,
    softmax,
    uploaded,
    uploaded_ids,
)
from motet.engines.native.sample.philox import uniforms
from motet.engines.native.sample.top_logprobs import named_ids, score, token_logprobs, unpack
from motet.types import LogprobsMode


class Sampler:
    """Draws tokens on one device. Keeps nothing between steps but scratch memory and the last group's settings."""

    def __init__(self, vocab_size: int, device: torch.device, *, filters: Filters | None = None) -> None:
        """Without `filters` it takes the fastest ones for the device."""
        self._vocab_size = vocab_size
        self._device = device
        self._filters = filters or filters_for(vocab_size, device)
        self._compiled = self._filters if isinstance(self._filters, CompiledDraws) else None
        self._scratch = LogitsScratch(vocab_size, device)
        self._settings = LaneParamsMaker(vocab_size, device)
        self._masks = Masks(vocab_size, device)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Draws one token a row, in their order. `logits` [any, vocabulary] of any float type are left as they are."""
        done: dict[int, Sampled] = {}
        if self._compiled and (places := self._compiled.straight(rows)):
            drawn = self._compiled.draw_straight(logits, [rows[place] for place in places])
            if len(places) == len(rows):
                return list(drawn)
            done = dict(zip(places, drawn, strict=True))
        uniform = _uniforms(rows)
        for level in range(len(self._filters.widths)):
            pending = [choice for choice in range(len(rows)) if choice not in done]
            if not pending:
                break
            widths = self._filters.widths[level:]
            batches = plan_batches(rows, pending, widths=widths, max_lanes=self._scratch.capacity)
            done |= self._attempt(logits, rows, batches=batches, uniform=uniform)
        return [done[choice] for choice in range(len(rows))]

    def _attempt(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        *,
        batches: Sequence[LaneBatch],
        uniform: npt.NDArray[np.float64],
    ) -> dict[int, Sampled]:
        """Draws all choices of `batches`; returns those for which enough leaders were looked at."""
        order = [choice for batch in batches for choice in batch.choices]
        masks = [self._masks.fill([lane.state for lane in batch.lanes]) for batch in batches]
        drawn = self._draw(logits, batches, masks=masks, uniform=uploaded(uniform[order], self._device))
        scored = [place for place, choice in enumerate(order) if rows[choice].state.params.logprobs is not None]
        asked = [rows[order[place]].state.params for place in scored]
        named = uploaded(named_ids(asked), self._device)
        scores = drawn.new_empty(0, 2)
        if scored:
            k = max(params.logprobs or 0 for params in asked)
            wanted = _LogprobRequest(scored, drawn[:, 0].long(), named, min(k, logits.shape[1]))
            scores = self._score(logits, rows, wanted=wanted, batches=batches, masks=masks)
        token_ids, finite, enough, score_rows = _to_host(drawn, scores)
        logprobs = {
            place: unpack(
                token_ids[place],
                row,
                k=params.logprobs or 0,
                named=params.logprob_token_ids,
                num_named=named.shape[1],
            )
            for place, params, row in zip(scored, asked, score_rows, strict=True)
            if finite[place]
        }
        return {
            choice: Sampled(token_ids[place], logprobs.get(place), finite[place])
            for place, choice in enumerate(order)
            if enough[place] or not finite[place]
        }

    def _score(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        *,
        wanted: "_LogprobRequest",
        batches: Sequence[LaneBatch],
        masks: Sequence[LaneMasks],
    ) -> torch.Tensor:
        """Returns the rows of `token_logprobs` for the wanted places, in their order."""
        order = [choice for batch in batches for choice in batch.choices]
        processed = {
            place for place in wanted.places if rows[order[place]].state.params.logprobs_mode is LogprobsMode.PROCESSED
        }
        raw = [place for place in wanted.places if place not in processed]
        parts = []
        if raw:
            token_ids, named = wanted.at(raw)
            raw_rows = [rows[order[place]].logits_row for place in raw]
            parts.append(
                token_logprobs(self._scratch, logits, rows=raw_rows, token_ids=token_ids, named=named, k=wanted.k)
            )
        if not processed:
            return parts[0]
        places, first = raw, 0
        for batch, allowed in zip(batches, masks, strict=True):
            here = [place for place in range(first, first + len(batch.choices)) if place in processed]
            if here:
                x = self._processed(logits, batch, allowed=allowed)
                token_ids, named = wanted.at(here)
                lanes = [batch.lane_of_choice[place - first] for place in here]
                scored = score(
                    x,
                    uploaded_ids(lanes, self._device),
                    token_ids,
                    one_each=lanes == list(range(len(x))),
                    named=named,
                    k=wanted.k,
                    spare=self._scratch.beside(x),
                )
                parts.append(scored)
                places = places + here
            first += len(batch.choices)
        back = np.argsort(places)  # the wanted places rise
        return torch.cat(parts)[uploaded(back, self._device)]

    def _draw(
        self,
        logits: torch.Tensor,
        batches: Sequence[LaneBatch],
        *,
        masks: Sequence[LaneMasks],
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the results of `_draw_batch` for all batches, one after the other."""
        parts = []
        first = 0
        for batch, allowed in zip(batches, masks, strict=True):
            x = self._edited(logits, batch, allowed=allowed)
            last = first + len(batch.choices)
            parts.append(self._draw_batch(batch, x, settings=self._made(batch), uniform=uniform[first:last]))
            first = last
        return torch.cat(parts)

    def _made(self, batch: LaneBatch) -> LaneParams:
        return self._settings.make([lane.state.params for lane in batch.lanes])

    def _edited(self, logits: torch.Tensor, batch: LaneBatch, *, allowed: LaneMasks) -> torch.Tensor:
        """Returns the logits of a batch after grammars, bias and penalties, in scratch memory."""
        x = self._scratch.load(logits, [lane.logits_row for lane in batch.lanes])
        if any(lane.has_edits for lane in batch.lanes):
            self._masks.apply(x, allowed, spare=self._scratch.beside(x))
            apply_edits(x, [lane.state for lane in batch.lanes], vocab_size=self._vocab_size)
        return x

    def _processed(self, logits: torch.Tensor, batch: LaneBatch, *, allowed: LaneMasks) -> torch.Tensor:
        """Returns the logits from which the tokens of a batch are drawn, in scratch memory; greedy ones have neither
        temperature nor filters."""
        x = self._edited(logits, batch, allowed=allowed)
        if batch.kind is Kind.OPEN:
            at_temperature(x, self._made(batch))
        elif batch.kind is Kind.FILTERED:
            spare = self._scratch.beside(x)
            self._filters.keep(x, self._made(batch), k=batch.leaders, spare=spare)
        return x

    def _draw_batch(
        self, batch: LaneBatch, x: torch.Tensor, *, settings: LaneParams, uniform: torch.Tensor
    ) -> torch.Tensor:
        """Draws one token for each of the batch's choices, on the device and without waiting for it. Returns [choices,
        3] float64, which holds all exactly: token id; finite (0: the lane's logits were no distribution); enough (0:
        the token may be wrong, look at more leaders).

        `x` [lanes, padded vocabulary] float32 are its logits after edits, and are overwritten; `uniform` [choices]
        float64.
        """
        lane_of_choice, spare = uploaded_ids(batch.lane_of_choice, x.device), self._scratch.beside(x)
        finite = x.amax(-1).isfinite()[lane_of_choice]
        enough = torch.ones_like(finite)
        if batch.kind is Kind.GREEDY:
            token_ids = leaders(x, 1).squeeze(1)[lane_of_choice]
        elif batch.kind is Kind.OPEN:
            token_ids = draw_dense(softmax(x, settings, with_min_p=True, out=spare), lane_of_choice, uniform)
        else:
            token_ids, enough = self._filters.draw(
                x, settings, k=batch.leaders, lanes=lane_of_choice, uniform=uniform, spare=spare
            )
        return torch.stack([token_ids.double(), finite.double(), enough.double()], dim=1)


@dataclass(frozen=True)
class _LogprobRequest:
    """The log-probabilities that the choices of an attempt want."""

    places: Sequence[int]
    """The places of these choices in the attempt, rising."""
    token_ids: torch.Tensor
    """[all choices] int64, drawn"""
    named: torch.Tensor
    """[places, m] int64"""
    k: int

    def at(self, places: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the drawn and the named tokens of some of the places."""
        token_ids = self.token_ids[uploaded_ids(places, self.token_ids.device)]
        if len(places) == len(self.places):
            return token_ids, self.named
        number = {place: number for number, place in enumerate(self.places)}
        return token_ids, self.named[uploaded_ids([number[place] for place in places], self.named.device)]


def _uniforms(rows: Sequence[SampleRow]) -> npt.NDArray[np.float64]:
    """Returns one uniform a row; greedy rows need none."""
    if all(row.state.params.greedy for row in rows):
        return np.zeros(len(rows))
    seeds = np.array([row.state.seed for row in rows], np.uint64)
    return uniforms(seeds, np.array([row.position for row in rows], np.uint64))


def _to_host(drawn: torch.Tensor, scores: torch.Tensor) -> tuple[list[int], list[bool], list[bool], list[list[float]]]:
    """Brings token ids, finite and enough, a list each, and the scores to the host, in one copy."""
    flat = torch.cat([drawn.flatten(), scores.flatten()]).cpu().numpy()  # whose `tolist` is the faster one
    token_ids, finite, enough = flat[: drawn.numel()].reshape(drawn.shape).T
    score_rows = flat[drawn.numel() :].reshape(scores.shape).tolist()
    return token_ids.astype(np.int64).tolist(), (finite != 0).tolist(), (enough != 0).tolist(), score_rows
