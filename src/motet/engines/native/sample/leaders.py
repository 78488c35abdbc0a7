"""The best k tokens of a row in one fixed order: higher logit first, lower id first among equals.

Logits come in bf16, where equal values are everywhere, and `topk` picks among equals as it pleases. So this file sorts
integer keys (logit, then id), which never tie; and to make few of them it looks at blocks of the vocabulary first:
the best k tokens lie in the k blocks with the best maxima, since each of these blocks holds a token that is at least
as good as any token of the other blocks (and has a lower id where the two are equal).
"""

import torch

_MAX_BLOCK = 64
_MIN_BLOCKS_PER_LEADER = 4
_ID_BITS = 32


def leaders(x: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [lanes, k] int64 of the best `k` tokens of `x` [lanes, width] float32, best first.

    `width` is a multiple of 64 and at least `k`; NaN counts as the best (or, with its sign bit set, as the worst).
    """
    lanes, width = x.shape
    block = _block_size(width, k)
    blocks = x.view(lanes, width // block, block)
    ids = torch.arange(width, device=x.device).view(1, -1, block)  # [1, blocks, block]
    if block > 1:
        first_ids = ids[:, :, 0]
        best = _best(_keys(blocks.amax(-1), first_ids), k) // block  # [lanes, k]
        blocks = blocks.gather(1, best.unsqueeze(-1).expand(-1, -1, block))  # [lanes, k, block]
        ids = ids.squeeze(0)[best]
    return _best(_keys(blocks, ids).flatten(1), k)


def _block_size(width: int, k: int) -> int:
    block = _MAX_BLOCK
    while block > 1 and width // block < _MIN_BLOCKS_PER_LEADER * k:
        block //= 2
    return block


def _keys(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that are greater for a greater logit and, among equal logits, for a lower id."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two zeros are one value
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # float order as signed integer order
    return (ordered.long() << _ID_BITS) - ids


def _best(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the `k` greatest keys of each row, greatest first."""
    best = keys.topk(k, dim=-1).values
    return torch.bitwise_and(-best, 2**_ID_BITS - 1)
