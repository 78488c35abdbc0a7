"""Draws from the lanes of one batch: logits in, a token a choice out. All on the device, without waiting for it."""

from dataclasses import dataclass

import torch

from motet.engines.native.sample.filters import Candidates, Leaders, candidates
from motet.engines.native.sample.inverse_cdf import draw_dense, invert, total_weight
from motet.engines.native.sample.lanes import Batch, Kind
from motet.engines.native.sample.leaders import leaders, leaders_surely
from motet.engines.native.sample.settings import Settings, softmax
from motet.engines.native.sample.upload import uploaded_ids


@dataclass(frozen=True)
class Drawn:
    """What was drawn, one entry a choice."""

    token_ids: torch.Tensor
    """int64"""
    finite: torch.Tensor
    """bool; False: the lane's logits were no distribution, and the token means nothing."""
    enough: torch.Tensor
    """bool; False: the token may be wrong, look at more leaders."""

    def packed(self) -> torch.Tensor:
        """[choices, 3] float64, which holds all of them exactly."""
        return torch.stack([self.token_ids.double(), self.finite.double(), self.enough.double()], dim=1)


def draw(batch: Batch, settings: Settings, x: torch.Tensor, *, uniform: torch.Tensor, spare: torch.Tensor) -> Drawn:
    """One token for each of the batch's choices.

    `x` [lanes, padded vocabulary] float32 are its logits after edits, and are overwritten; `uniform` [choices] float64;
    `spare` is memory of the shape of `x`.
    """
    lane_of_choice = uploaded_ids(batch.lane_of_choice, x.device)
    finite = x.amax(-1).isfinite()[lane_of_choice]
    enough = torch.ones_like(finite)
    if batch.kind is Kind.GREEDY:
        return Drawn(leaders(x, 1).squeeze(1)[lane_of_choice], finite, enough)
    if batch.kind is Kind.OPEN:
        weights = softmax(x, settings, with_min_p=True, out=spare)
        return Drawn(draw_dense(weights, lane_of_choice, uniform), finite, enough)
    kept = _filtered(batch, x, settings, spare)
    index, _ = invert(kept.weights[lane_of_choice], uniform)
    return Drawn(kept.ids[lane_of_choice, index], finite, kept.enough[lane_of_choice])


def _filtered(batch: Batch, x: torch.Tensor, settings: Settings, spare: torch.Tensor) -> Candidates:
    ids, sure = leaders_surely(x, batch.leaders, batch.vocab_size)
    values = x.gather(1, ids)
    scaled = (values - values[:, :1]) / settings.temperature
    weights = softmax(x, settings, with_min_p=False, out=spare)
    best = Leaders(ids, scaled, weights.gather(1, ids).double(), sure)
    return candidates(best, total_weight(weights), settings)
