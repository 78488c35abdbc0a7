"""Which keys a row sees: causal, and inside a sliding window where the layer has one."""

import torch

from motet.engines.native.attention.plan import PromptRead, TailRead, TrunkRead


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _seen(positions: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which key positions a query position sees: itself and those before it, at most `window` in all."""
    seen = keys <= positions
    return seen if window is None else seen & (keys > positions - window)


def prompt_mask(read: PromptRead, window: int | None, device: torch.device) -> torch.Tensor:
    """[1, 1, rows, keys] bool."""
    positions = torch.arange(read.begin, read.end, device=device).sub_(read.begin - read.first_position)
    keys = torch.arange(read.num_keys, device=device)
    return _seen(positions[:, None], keys[None, :], window)[None, None]


def trunk_mask(read: TrunkRead, window: int | None, device: torch.device, siblings: int) -> torch.Tensor | None:
    """[1, 1, rows * siblings, keys] bool, or None where every row sees the whole trunk."""
    if window is None or max(read.positions) < window:
        return None
    positions = torch.tensor(read.positions, device=device).repeat_interleave(siblings)
    keys = torch.arange(read.num_keys, device=device)
    return _seen(positions[:, None], keys[None, :], window)[None, None]


def tail_mask(read: TailRead, window: int | None, device: torch.device, siblings: int) -> torch.Tensor:
    """[pieces, 1, rows * siblings, keys] bool; positions are offsets in the tail on both sides."""
    first = torch.tensor(read.first_offsets, device=device)[:, None]
    offsets = (first + torch.arange(read.rows_per_piece, device=device)[None, :]).repeat_interleave(siblings, dim=1)
    keys = torch.arange(read.num_keys, device=device)
    return _seen(offsets[:, None, :, None], keys[None, None, None, :], window)
