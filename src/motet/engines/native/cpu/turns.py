"""How far each position turns a head: rotary embeddings of every position, computed once, by the model's own module."""

from typing import Any

import torch
from torch import nn


class Turns:
    """Cosines and sines [positions, head_dim / 2] float32. Gemma 3 has two kinds of layers that turn differently."""

    def __init__(self, rotary: nn.Module, positions: int) -> None:
        self._rotary = rotary
        self._positions = torch.arange(positions).unsqueeze(0)
        self._kinds: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def of(self, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of an attention module."""
        kind = attention.layer_type if hasattr(self._rotary, "layer_types") else None
        if kind not in self._kinds:
            which = () if kind is None else (kind,)
            cosines, sines = self._rotary(torch.empty(0), self._positions, *which)  # [1, positions, head_dim]
            half = cosines.shape[-1] // 2  # the other half says the same
            self._kinds[kind] = cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
        return self._kinds[kind]
