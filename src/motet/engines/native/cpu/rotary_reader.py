"""Recognizes the RoPE of a layer from its queries at several positions, and computes the tables of the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet.engines.native.cpu.norm_reader import CLOSE, StructureError, difference


@dataclass(frozen=True)
class RotaryRead:
    """RoPE of the first `dims` elements of a head."""

    module: Any
    """The model's own module, which computes cosines and sines."""
    kind: str | None
    """Argument of the module in models whose kinds of layers have different tables (Gemma 3)."""
    dims: int
    adjacent: bool
    """True if elements 2i and 2i + 1 are a pair, False if elements i and i + dims / 2 are."""

    def tables(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each [positions, dims / 2] float32."""
        return _tables(self.module, self.kind, positions=positions)


class RotaryReader:
    """Compares queries with the queries that each RoPE of a model would compute."""

    def __init__(self, modules: Sequence[nn.Module], positions: Sequence[int]) -> None:
        """`positions`: positions of the queries, starting with 0."""
        self._candidates: list[tuple[RotaryRead, Tensor, Tensor]] = []
        for module in modules:
            kinds = getattr(module, "layer_types", None)
            for kind in (None,) if kinds is None else tuple(kinds):
                cosines, sines = _tables(module, kind, positions=positions)
                for adjacent in (False, True):
                    read = RotaryRead(module, kind, 2 * cosines.shape[-1], adjacent)
                    self._candidates.append((read, cosines, sines))

    def read(self, queries: Tensor) -> RotaryRead | None:
        """Returns the RoPE of queries [heads, positions, head_dim] of equal tokens; None if they have none. Raises
        StructureError for queries that depend on the position in another way."""
        queries = queries.float().cpu()
        plain = queries[:, :1].expand_as(queries)
        best, error = None, difference(plain, queries)
        for read, cosines, sines in self._candidates:
            if read.dims <= queries.shape[-1]:
                found = difference(_rotated(plain, read, cosines=cosines, sines=sines), queries)
                best, error = (read, found) if found < error else (best, error)
        if error > CLOSE:
            raise StructureError("queries that depend on the position otherwise than by RoPE")
        return best


def _rotated(first: Tensor, read: RotaryRead, *, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns the queries at all positions, from the query at position 0, which only has a factor."""
    half = read.dims // 2
    turned, rest = first[..., : read.dims], first[..., read.dims :]
    pairs = turned.reshape(*turned.shape[:-1], *((half, 2) if read.adjacent else (2, half)))
    a, b = pairs.unbind(-1 if read.adjacent else -2)
    a, b = a / cosines[0], b / cosines[0]
    parts = [a * cosines - b * sines, b * cosines + a * sines]
    return torch.cat([torch.stack(parts, -1 if read.adjacent else -2).flatten(-2), rest], -1)


@torch.no_grad()
def _tables(module: Any, kind: str | None, *, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines. Models repeat them, one after the other or in two halves, or do not repeat them."""
    which = () if kind is None else (kind,)
    device = next((one.device for one in module.buffers()), torch.device("cpu"))
    places = torch.tensor([list(positions)], device=device)
    found = module(torch.empty(0, device=device), places, *which)
    if not isinstance(found, tuple):
        raise StructureError(f"the RoPE of {type(module).__name__}")
    cosines, sines = (one[0].float().cpu() for one in found)
    half = cosines.shape[-1] // 2
    for pick in (slice(half), slice(0, None, 2)):
        other = slice(half, None) if pick == slice(half) else slice(1, None, 2)
        if torch.equal(cosines[:, pick], cosines[:, other]) and torch.equal(sines[:, pick], sines[:, other]):
            return cosines[:, pick].contiguous(), sines[:, pick].contiguous()
    return cosines, sines
