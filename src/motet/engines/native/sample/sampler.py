"""Draws the next token of every choice of a step, in a few operations over all of them.

A token is a function of the bits of its row of logits, the choice's parameters and past, its seed and its position,
and of nothing else. So every operation here works row by row, equal logits have a fixed order, and what is drawn does
not depend on which path found it. The life of a step:

1. Choices become lanes (one distribution each), lanes become batches of one kind (`lanes`).
2. A batch's logits are copied as float32 into scratch memory and changed by grammars (`masks`), bias and penalties
   (`edits`).
3. Greedy lanes take their best token. The others become weights (`settings`), which top-k and top-p cut down to
   candidates (`filters`), and one uniform a choice (`philox`) finds the token (`inverse_cdf`).
4. Tokens, flags and log-probabilities come to the host in one copy. Lanes whose top-p reaches further than the leaders
   looked at are drawn again with more of them, in the end with all.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.sample.draw import draw
from motet.engines.native.sample.edits import apply_edits
from motet.engines.native.sample.lanes import Batch, SampleRow, plan_batches
from motet.engines.native.sample.logprobs import token_logprobs, unpack
from motet.engines.native.sample.masks import Masks
from motet.engines.native.sample.philox import uniforms
from motet.engines.native.sample.scratch import Scratch
from motet.engines.native.sample.settings import SettingsMaker
from motet.engines.native.sample.upload import uploaded, uploaded_ids
from motet.types import TokenLogprob

__all__ = ["SampleRow", "Sampled", "Sampler"]

Columns = tuple[list[int], list[bool], list[bool]]
_WIDTHS = (64, 512, 4096)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """The next token of one choice."""

    token_id: int
    logprob: TokenLogprob | None
    """Only if the choice asked for it, and only if `finite`."""
    finite: bool = True
    """False: the logits held NaN or +inf, or nothing but -inf; then `token_id` means nothing."""


class Sampler:
    """Draws tokens on one device. Keeps nothing between steps but scratch memory and the last group's settings."""

    def __init__(self, vocab_size: int, device: torch.device, *, widths: Sequence[int] = _WIDTHS) -> None:
        """`widths`, rising: how many leaders of a filtered lane to look at, first and then on demand."""
        self._vocab_size = vocab_size
        self._device = device
        self._widths = (*(width for width in widths if width < vocab_size), vocab_size)
        self._scratch = Scratch(vocab_size, device)
        self._settings = SettingsMaker(vocab_size, device)
        self._masks = Masks(vocab_size, device)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """One token a row, in their order. `logits` [any, vocabulary] of any float type are left as they are."""
        uniform = _uniforms(rows)
        done: dict[int, Sampled] = {}
        for level in range(len(self._widths)):
            pending = [choice for choice in range(len(rows)) if choice not in done]
            if not pending:
                break
            batches = plan_batches(
                rows,
                pending,
                vocab_size=self._vocab_size,
                widths=self._widths[level:],
                max_lanes=self._scratch.capacity,
            )
            done |= self._attempt(logits, rows, batches, uniform)
        return [done[choice] for choice in range(len(rows))]

    def _attempt(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        batches: Sequence[Batch],
        uniform: npt.NDArray[np.float64],
    ) -> dict[int, Sampled]:
        """Draws all choices of `batches`; gives those for which enough leaders were looked at."""
        order = [choice for batch in batches for choice in batch.choices]
        drawn = self._draw(logits, batches, uploaded(uniform[order], self._device))
        scored = [place for place, choice in enumerate(order) if rows[choice].state.params.logprobs is not None]
        if scored:
            scores = self._score(
                logits, [rows[order[place]] for place in scored], drawn[uploaded_ids(scored, self._device), 0].long()
            )
        else:
            scores = drawn.new_empty(0, 2)
        (token_ids, finite, enough), score_rows = _to_host(drawn, scores)
        scores_of = dict(zip([order[place] for place in scored], score_rows, strict=True))
        return {
            choice: _sampled(token_ids[place], finite[place], rows[choice], scores_of.get(choice))
            for place, choice in enumerate(order)
            if enough[place] or not finite[place]
        }

    def _draw(self, logits: torch.Tensor, batches: Sequence[Batch], uniform: torch.Tensor) -> torch.Tensor:
        """[choices in the order of the batches, 3] float64: token id, finite, enough."""
        parts = []
        first = 0
        masks = self._masks.fill([[lane.state for lane in batch.lanes] for batch in batches])
        for batch, allowed in zip(batches, masks, strict=True):
            x = self._scratch.load(logits, [lane.logits_row for lane in batch.lanes])
            if any(lane.has_edits for lane in batch.lanes):
                self._masks.apply(x, allowed, spare=self._scratch.beside(x))
                apply_edits(x, [lane.state for lane in batch.lanes], self._vocab_size)
            last = first + len(batch.choices)
            settings = self._settings.make([lane.state.params for lane in batch.lanes])
            drawn = draw(batch, settings, x, uniform=uniform[first:last], spare=self._scratch.beside(x))
            parts.append(drawn.packed())
            first = last
        return torch.cat(parts)

    def _score(self, logits: torch.Tensor, rows: Sequence[SampleRow], token_ids: torch.Tensor) -> torch.Tensor:
        """Packed scores [rows, 2 + 2k] for the largest k that one of the rows asks for."""
        k = max((row.state.params.logprobs or 0 for row in rows), default=0)
        return token_logprobs(self._scratch, logits, [row.logits_row for row in rows], token_ids, k)


def _uniforms(rows: Sequence[SampleRow]) -> npt.NDArray[np.float64]:
    """One a row; greedy ones need none."""
    if all(row.state.params.greedy for row in rows):
        return np.zeros(len(rows))
    seeds = np.array([row.state.seed for row in rows], np.uint64)
    return uniforms(seeds, np.array([row.position for row in rows], np.uint64))


def _to_host(drawn: torch.Tensor, scores: torch.Tensor) -> tuple[Columns, list[list[float]]]:
    """Token ids, finite and enough, a list each, and the scores; in one copy."""
    flat = torch.cat([drawn.flatten(), scores.flatten()]).cpu().numpy()  # whose `tolist` is the faster one
    token_ids, finite, enough = flat[: drawn.numel()].reshape(drawn.shape).T
    columns = token_ids.astype(np.int64).tolist(), (finite != 0).tolist(), (enough != 0).tolist()
    return columns, flat[drawn.numel() :].reshape(scores.shape).tolist()


def _sampled(token_id: int, finite: bool, row: SampleRow, scores: Sequence[float] | None) -> Sampled:
    if scores is None or not finite:
        return Sampled(token_id, None, finite)
    return Sampled(token_id, unpack(token_id, scores, row.state.params.logprobs or 0), finite)
