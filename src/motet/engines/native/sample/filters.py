"""Top-k, top-p and min-p. Each keeps a front part of one order (higher logit first, lower id among equals), so all
three together are one number: how many of the leaders are kept.

Whether the leaders at hand are enough to know that number is part of the answer: top-p cannot say before it has summed
so far. The sampler then asks again with more of them, and keeps the same set, because order, weights and the mass to
reach do not depend on how many leaders were looked at.
"""

from dataclasses import dataclass

import torch

from motet.engines.native.sample.settings import Settings


@dataclass(frozen=True)
class Leaders:
    """The best k tokens of each lane, best first, all [lanes, k]."""

    ids: torch.Tensor
    """int64"""
    scaled: torch.Tensor
    """float32: logit less the best logit, over temperature"""
    weights: torch.Tensor
    """float64: softmax over the whole vocabulary"""
    sure: torch.Tensor
    """[lanes, 1] int64: how many of them are known to be in their right place"""


@dataclass(frozen=True)
class Candidates:
    """The tokens a lane may draw, in id order, followed by tokens of weight 0."""

    ids: torch.Tensor
    """[lanes, k] int64"""
    weights: torch.Tensor
    """[lanes, k] float64"""
    enough: torch.Tensor
    """[lanes] bool; False: tokens are missing, look at more leaders."""


def candidates(best: Leaders, whole: torch.Tensor, settings: Settings) -> Candidates:
    """What the filters keep of the leaders, of which there are at least as many as any lane's top-k.

    `whole` [lanes, 1] float64 is the sum of all weights of the lane.
    """
    k = best.ids.shape[1]
    size = _kept(best, whole, settings)
    dropped = torch.arange(k, device=size.device) >= size
    last = torch.iinfo(torch.int64).max  # dropped tokens go behind all others, where they add nothing to the sum
    order = best.ids.masked_fill(dropped, last).argsort(-1)
    weights = best.weights.masked_fill(dropped, 0.0).gather(1, order)
    return Candidates(best.ids.gather(1, order), weights, (size <= best.sure).squeeze(-1))


def _kept(best: Leaders, whole: torch.Tensor, settings: Settings) -> torch.Tensor:
    """How many of the leaders are kept [lanes, 1] int64; more than there are leaders means: not known yet."""
    k = best.ids.shape[1]
    top_k = settings.top_k
    mass = best.weights.cumsum(-1)
    goal = settings.top_p * torch.where(top_k <= k, mass.gather(1, (top_k - 1).clamp(max=k - 1)), whole)
    by_top_p = torch.where(settings.top_p < 1.0, 1 + (mass < goal).sum(-1, keepdim=True), top_k)
    above = best.scaled >= settings.log_min_p
    by_min_p = torch.where(above[:, -1:], top_k, above.sum(-1, keepdim=True))
    return top_k.minimum(by_top_p).minimum(by_min_p)
