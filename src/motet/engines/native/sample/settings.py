"""The sampling parameters of a batch of lanes as tensors, brought to the device in one copy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


def settings_of(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Settings:
    """Those of lane i are `params[i]`; the lanes of a group have one and the same."""
    different = {id(p): p for p in params}
    table = [
        (
            max(p.temperature, _COLDEST),
            p.top_k if 0 < p.top_k < vocab_size else vocab_size,
            p.top_p,
            math.log(p.min_p) if p.min_p > 0.0 else -math.inf,
        )
        for p in different.values()
    ]
    columns = torch.tensor(table, dtype=torch.float64, device=device)
    if len(table) > 1:
        place = {key: i for i, key in enumerate(different)}
        columns = columns[torch.tensor([place[id(p)] for p in params], device=device)]
    temperature, top_k, top_p, log_min_p = columns.unsqueeze(1).unbind(2)
    lanes = len(params), 1
    return Settings(
        temperature=temperature.float().expand(lanes),
        top_k=top_k.long().expand(lanes),
        top_p=top_p.expand(lanes),
        log_min_p=log_min_p.float().expand(lanes),
        all_plain=all(p.temperature == 1.0 for p in different.values()),
        any_min_p=any(p.min_p > 0.0 for p in different.values()),
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
