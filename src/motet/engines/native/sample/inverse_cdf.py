"""From a uniform to a token: the inverse of the cumulative distribution in token-id order.

The cumulative sum of a whole vocabulary is long, and in float32 its small steps drown. So a row is drawn from twice:
first a block of the vocabulary by the blocks' masses, then a token in it by what is left of the uniform. Cumulative
sums are float64, scaled by their own last value, so a uniform below 1 always finds a token of positive weight.
"""

import torch

BLOCK = 256
"""Rows are padded to a multiple of this with tokens of weight 0."""


def draw_dense(weights: torch.Tensor, lanes: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [choices] drawn from `weights` [lanes, padded vocabulary] float32; choice i draws from `lanes[i]`.

    A row that holds NaN yields some id inside it.
    """
    block, rest = invert(_masses(weights)[lanes], uniform)
    offset, _ = invert(_blocks(weights)[lanes, block].double(), rest)
    return block * BLOCK + offset


def total_weight(weights: torch.Tensor) -> torch.Tensor:
    """[lanes, 1] float64, summed as `draw_dense` does."""
    return _masses(weights).sum(-1, keepdim=True)


def invert(weights: torch.Tensor, fraction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index [n] at which the cumulative sum of `weights` [n, k] float64 exceeds `fraction` [n] of the total.

    Also returns which fraction of that index's own weight was left, to draw on from inside it.
    """
    cdf = weights.cumsum(-1)
    total = cdf[:, -1]
    # What is left of a block may be rounded up to all of it, beyond which no index lies.
    target = torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(-1)
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    weight = weights.gather(1, index)
    rest = (target - (cdf.gather(1, index) - weight)) / weight
    return index.squeeze(-1), rest.squeeze(-1).clamp_(min=0.0)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """[lanes, blocks, BLOCK]"""
    return weights.view(weights.shape[0], -1, BLOCK)


def _masses(weights: torch.Tensor) -> torch.Tensor:
    """[lanes, blocks] float64"""
    return _blocks(weights).sum(-1).double()
