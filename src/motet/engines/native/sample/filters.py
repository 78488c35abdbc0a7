"""Top-k, top-p and min-p: which tokens of a lane they keep, and the draw among these.

The tokens of a lane have one order, higher logit first and lower id first among equals, and each filter keeps a front
part of it. Top-p keeps the fewest tokens whose weights reach a goal. Weights are added up as integers, so that a sum
has the same bits in any order. The compiled kernels (`compiled`) do the same without sorting, with weights of their
own, which are rounded in other places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from motet.engines.native.sample.candidates import invert, leaders_surely, masses
from motet.engines.native.sample.lanes import LaneParams, softmax

_WIDTHS = (64, 512, 4096)
_UNITS = 2.0**62
"""The integer of a weight of 1: weights from 2^-38 on are exact, and the sum of a lane fits."""


class Filters(Protocol):
    """Draws from filtered lanes. All implementations draw the same tokens, but for the rounding of weights."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of leaders of a lane to look at, first and then on demand, rising; the last one is the vocabulary's
        size."""
        ...

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
        """Draws token ids [choices] of the best `k` of the logits `x` [lanes, width] float32; choice i draws from
        `lanes[i]`, which rise, and no lane's top-k is more than `k`. Also returns [choices] bool, False: look at more
        leaders.

        The tokens that the filters keep are drawn from in id order, as from a whole vocabulary. `x` and `spare`, memory
        of its shape, are overwritten.
        """
        ...

    def keep(self, x: torch.Tensor, settings: LaneParams, *, k: int, spare: torch.Tensor) -> None:
        """Turns the logits `x` [lanes, width] float32 into those from which `draw` draws: less the best one, over
        temperature, and -inf for the tokens that the filters drop. A lane for which it wants more leaders gets nothing
        of use. `spare`, memory of the shape of `x`, is overwritten."""
        ...


class TorchFilters:
    """Filters with torch's operators, on any device: the best `k` tokens are put in order. Top-p may need more of them
    than there are. The sampler then asks again with more, and gets the same set, because order, weights and the mass to
    reach do not depend on the number of leaders."""

    def __init__(self, vocab_size: int, *, widths: Sequence[int] = _WIDTHS) -> None:
        self.widths = (*(width for width in widths if width < vocab_size), vocab_size)
        self._vocab_size = vocab_size

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
        found = self._filtered(x, settings, k=k, spare=spare)
        last = torch.iinfo(torch.int64).max  # dropped tokens go behind all others, where they add nothing to the sum
        order = found.ids.masked_fill(found.dropped, last).argsort(-1)
        index, _ = invert(found.weights.masked_fill(found.dropped, 0.0).gather(1, order)[lanes], uniform)
        return found.ids.gather(1, order)[lanes, index], found.enough.squeeze(-1)[lanes]

    def keep(self, x: torch.Tensor, settings: LaneParams, *, k: int, spare: torch.Tensor) -> None:
        found = self._filtered(x, settings, k=k, spare=spare)
        if settings.all_plain:  # else it has been done
            x.sub_(x.amax(-1, keepdim=True))
        kept = x.gather(1, found.ids).masked_fill_(found.dropped, -torch.inf)
        x.fill_(-torch.inf).scatter_(1, found.ids, kept)

    def _filtered(self, x: torch.Tensor, settings: LaneParams, *, k: int, spare: torch.Tensor) -> "_Filtered":
        """Unless all lanes have temperature 1, `x` is brought to temperature; `spare` is overwritten."""
        ids, sure = leaders_surely(x, k, vocab_size=self._vocab_size)
        values = x.gather(1, ids)
        scaled = (values - values[:, :1]) / settings.temperature
        weights = softmax(x, settings, with_min_p=False, out=spare)
        whole = masses(weights).sum(-1, keepdim=True)  # summed as `draw_dense` does
        best = weights.gather(1, ids).double()
        size = self._num_kept(best, scaled, whole, settings)
        return _Filtered(ids, best, torch.arange(k, device=size.device) >= size, size <= sure)

    def _num_kept(
        self, best: torch.Tensor, scaled: torch.Tensor, whole: torch.Tensor, settings: LaneParams
    ) -> torch.Tensor:
        """Returns how many of the leaders are kept [lanes, 1] int64; more than there are leaders: not known yet.

        `best` [lanes, k] float64 are the leaders' weights, `whole` [lanes, 1] the sum of all weights; `scaled` [lanes,
        k] float32 are the leaders' logits less the best one, over temperature."""
        k, top_k = best.shape[1], settings.top_k
        mass = (best * _UNITS).long().cumsum(-1).double() / _UNITS
        limited = mass.gather(1, (top_k - 1).clamp(max=k - 1))
        goal = settings.top_p * torch.where(top_k < self._vocab_size, limited, whole)
        by_top_p = torch.where(settings.top_p < 1.0, 1 + (mass < goal).sum(-1, keepdim=True), top_k)
        above = scaled >= settings.log_min_p
        by_min_p = torch.where(above[:, -1:], top_k, above.sum(-1, keepdim=True))
        return top_k.minimum(by_top_p).minimum(by_min_p)


@dataclass(frozen=True)
class _Filtered:
    """The leaders of a batch of lanes, and which of them the filters keep."""

    ids: torch.Tensor
    """[lanes, k] int64, best first"""
    weights: torch.Tensor
    """[lanes, k] float64"""
    dropped: torch.Tensor
    """[lanes, k] bool"""
    enough: torch.Tensor
    """[lanes, 1] bool; False: look at more leaders"""
