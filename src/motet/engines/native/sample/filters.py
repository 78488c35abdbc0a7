"""Top-k, top-p and min-p: the tokens of a lane that they keep, and sampling from these tokens.

The tokens of a lane are ordered by descending logit, and by ascending id for equal logits. Each filter keeps a prefix
of this order. Top-p keeps the smallest number of tokens whose summed weight reaches a target. Weights are summed as
integers, so a sum has the same bits in any order. The compiled kernels (`compiled_sampling`) do the same without
sorting; their weights are rounded in different places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from motet.engines.native.sample.candidates import invert, masses, top_tokens_and_num_exact
from motet.engines.native.sample.lanes import LaneParams, softmax

_WIDTHS = (64, 512, 4096)
_UNITS = 2.0**62
"""Integer that represents a weight of 1. Weights of 2^-38 and more are exact, and a lane's sum does not overflow."""


class Filters(Protocol):
    """Samples from lanes with filters. All implementations sample the same tokens, except for rounding of weights."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of candidates of a lane to try one after the other, ascending; the last is the vocabulary size."""
        ...

    def sample(
        self, x: Tensor, lane_params: LaneParams, *, k: int, lanes: Tensor, uniform: Tensor, spare: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Samples from the top `k` tokens of the logits `x` [lanes, width] float32.

        Choice i samples from lane `lanes[i]` ([choices] int64, ascending) with `uniform[i]` ([choices] float64). No
        lane's top-k is greater than `k`. Returns token ids [choices] int64, and [choices] bool: False if the choice
        needs more candidates. The inverse CDF goes through the kept tokens in id order, as it does without filters.
        Overwrites `x`, and `spare` of the same shape."""
        ...

    def filter_logits(self, x: Tensor, lane_params: LaneParams, *, k: int, spare: Tensor) -> None:
        """Changes the logits `x` [lanes, width] float32 in place to the logits from which `sample` samples: minus the
        maximum, divided by the temperature, and -inf for the tokens that the filters remove.

        The result is meaningless for a lane that needs more than `k` candidates. Overwrites `spare`, of the same shape.
        """
        ...


class TorchFilters:
    """Filters with torch's operators, on any device. They sort the top `k` tokens, the candidates.

    Top-p can need more candidates. The sampler then repeats the call with a greater `k`. The set of kept tokens does
    not depend on `k`, because the order, the weights and the target of top-p do not."""

    def __init__(self, vocab_size: int, *, widths: Sequence[int] = _WIDTHS) -> None:
        self.widths = (*(width for width in widths if width < vocab_size), vocab_size)
        self._vocab_size = vocab_size

    def sample(
        self, x: Tensor, lane_params: LaneParams, *, k: int, lanes: Tensor, uniform: Tensor, spare: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = self._filtered(x, lane_params, k=k, spare=spare)
        last = torch.iinfo(torch.int64).max  # removed tokens come last, where they add 0 to the cumulative sum
        order = found.ids.masked_fill(found.dropped, last).argsort(-1)
        index, _ = invert(found.weights.masked_fill(found.dropped, 0.0).gather(1, order)[lanes], uniform)
        return found.ids.gather(1, order)[lanes, index], found.enough.squeeze(-1)[lanes]

    def filter_logits(self, x: Tensor, lane_params: LaneParams, *, k: int, spare: Tensor) -> None:
        found = self._filtered(x, lane_params, k=k, spare=spare)
        if lane_params.all_unscaled:  # otherwise `_filtered` has subtracted it
            x.sub_(x.amax(-1, keepdim=True))
        kept = x.gather(1, found.ids).masked_fill_(found.dropped, -torch.inf)
        x.fill_(-torch.inf).scatter_(1, found.ids, kept)

    def _filtered(self, x: Tensor, lane_params: LaneParams, *, k: int, spare: Tensor) -> "_Filtered":
        """Unless all lanes have temperature 1, also applies the temperature to `x`. Overwrites `spare`."""
        ids, num_exact = top_tokens_and_num_exact(x, k, vocab_size=self._vocab_size)
        values = x.gather(1, ids)
        scaled = (values - values[:, :1]) / lane_params.temperature
        weights = softmax(x, lane_params, with_min_p=False, out=spare)
        total = masses(weights).sum(-1, keepdim=True)  # summed as `sample_dense` does
        best = weights.gather(1, ids).double()
        num_kept = self._num_kept(best, scaled, total, lane_params)
        return _Filtered(ids, best, torch.arange(k, device=num_kept.device) >= num_kept, num_kept <= num_exact)

    def _num_kept(self, best: Tensor, scaled: Tensor, total: Tensor, lane_params: LaneParams) -> Tensor:
        """Returns the number of candidates that the filters keep, [lanes, 1] int64. A number greater than k means that
        more candidates are needed to determine it.

        `best` [lanes, k] float64 are the weights of the candidates, and `total` [lanes, 1] float64 are the sums of all
        weights. `scaled` [lanes, k] float32 are the candidates' logits minus the maximum, divided by the temperature.
        """
        k, top_k = best.shape[1], lane_params.top_k
        mass = (best * _UNITS).long().cumsum(-1).double() / _UNITS
        limited = mass.gather(1, (top_k - 1).clamp(max=k - 1))
        target = lane_params.top_p * torch.where(top_k < self._vocab_size, limited, total)
        by_top_p = torch.where(lane_params.top_p < 1.0, 1 + (mass < target).sum(-1, keepdim=True), top_k)
        above = scaled >= lane_params.log_min_p
        by_min_p = torch.where(above[:, -1:], top_k, above.sum(-1, keepdim=True))
        return top_k.minimum(by_top_p).minimum(by_min_p)


@dataclass(frozen=True)
class _Filtered:
    """The candidates of a batch of lanes, and which of them the filters remove."""

    ids: Tensor  # [lanes, k] int64, by descending logit
    weights: Tensor  # [lanes, k] float64
    dropped: Tensor  # [lanes, k] bool
    enough: Tensor  # [lanes, 1] bool: False if the lane needs more candidates
