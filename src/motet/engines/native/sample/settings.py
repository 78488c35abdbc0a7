"""The sampling parameters of a batch of lanes as tensors, brought to the device in one copy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from motet.engines.native.sample.upload import uploaded
from motet.types import SamplingParams

_COLDEST = torch.finfo(torch.float32).tiny
"""A colder temperature would be 0 in float32; at this one all but the best token have weight 0 already."""


@dataclass(frozen=True)
class Settings:
    """Each tensor is [lanes, 1]."""

    temperature: torch.Tensor
    """float32"""
    top_k: torch.Tensor
    """int64; the vocabulary's size where it is off"""
    top_p: torch.Tensor
    """float64; 1 where it is off"""
    log_min_p: torch.Tensor
    """float32; -inf where it is off"""
    all_plain: bool
    """Every lane has temperature 1."""
    any_min_p: bool


class SettingsMaker:
    """Remembers those of the last batch that was of one group, as most are: every copy to a device costs."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._last: tuple[SamplingParams, int, Settings] | None = None

    def make(self, params: Sequence[SamplingParams]) -> Settings:
        """Those of lane i are `params[i]`; the lanes of a group have one and the same."""
        first, lanes = params[0], len(params)
        if any(p is not first for p in params):
            return self._made(params)
        if self._last is None or self._last[0] is not first or self._last[1] != lanes:
            self._last = first, lanes, self._made(params)
        return self._last[2]

    def _made(self, params: Sequence[SamplingParams]) -> Settings:
        different = {id(p): p for p in params}
        place = {key: i for i, key in enumerate(different)}
        rows = np.array([self._row(p) for p in different.values()])[[place[id(p)] for p in params]]  # [lanes, 4]
        temperature, top_k, top_p, log_min_p = uploaded(rows, self._device).unsqueeze(1).unbind(2)
        return Settings(
            temperature=temperature.float(),
            top_k=top_k.long(),
            top_p=top_p,
            log_min_p=log_min_p.float(),
            all_plain=all(p.temperature == 1.0 for p in different.values()),
            any_min_p=any(p.min_p > 0.0 for p in different.values()),
        )

    def _row(self, params: SamplingParams) -> tuple[float, float, float, float]:
        return (
            max(params.temperature, _COLDEST),
            params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        )


def softmax(x: torch.Tensor, settings: Settings, *, with_min_p: bool, out: torch.Tensor) -> torch.Tensor:
    """Weights [lanes, width] float32 of the logits `x` at their temperature, into `out`; may overwrite `x`.

    The best logit is taken off before the division, so that no temperature overflows. `with_min_p` leaves out what
    min-p drops: what it asks of a probability relative to the best one is an exact bound on the logit.
    """
    masked = with_min_p and settings.any_min_p
    if masked or not settings.all_plain:
        x.sub_(x.amax(-1, keepdim=True)).div_(settings.temperature)
    torch.softmax(x, -1, out=out)
    if masked:
        out.mul_(x.ge_(settings.log_min_p))  # a float mask; a boolean one takes ten times as long
    return out
