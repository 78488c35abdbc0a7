"""The best tokens of a row in their order (`leaders`), and the token that a uniform number selects (`draw_dense`)."""

import torch

_LEADER_BLOCK = 64
_MIN_BLOCKS_PER_LEADER = 16
_ID_BITS = 32
_FEW = 64  # up to here blocks win over `topk`
BLOCK = 256
"""Rows are padded to a multiple of this with tokens of weight 0."""


def leaders(x: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the ids [lanes, k] int64 of the best `k` tokens of `x` [lanes, width] float32 in one fixed order: higher
    logit first, lower id first among equals. `width` is a multiple of 64 and at least `k`; a row with NaN gives nothing
    of use.

    Logits come in bf16, where equal values are everywhere, and `topk` picks among equals as it pleases. So integer keys
    (logit, then id), which never tie, are sorted. Few leaders are looked for in blocks of the vocabulary: the best k
    tokens lie in the k blocks with the best maxima, since each of these holds a token that is at least as good as any
    token of the other blocks (and has a lower id where the two are equal).
    """
    lanes, width = x.shape
    block = _LEADER_BLOCK
    while block > 1 and width // block < _MIN_BLOCKS_PER_LEADER * k:
        block //= 2
    blocks = x.view(lanes, width // block, block)
    ids = torch.arange(width, device=x.device).view(-1, block)
    if block > 1:
        chosen = _best(_keys(blocks.amax(-1), ids[:, 0]), k) // block  # [lanes, k]
        blocks = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, block))  # [lanes, k, block]
        ids = ids[chosen]
    return _best(_keys(blocks, ids).flatten(1), k)


def leaders_surely(x: torch.Tensor, k: int, *, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the same as `leaders`, but fast for any `k`; also returns how many of them [lanes, 1], from the front, are
    certainly right.

    All are if `k` is small or the whole `vocab_size`, beyond which a row is -inf. Other numbers of leaders are taken by
    `topk` and sorted again: which of the tokens that equal the last one it took is chance. If that one is -inf, chance
    does no harm, since none of them has a weight.
    """
    if k == vocab_size:
        ids = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return ids, ids.new_full((len(ids), 1), k)
    if k <= _FEW:
        ids = leaders(x, k)
        return ids, ids.new_full((len(ids), 1), k)
    values, ids = x.topk(k, dim=-1)
    last = values[:, -1:]
    sure = torch.where(last == -torch.inf, k, (values > last).sum(-1, keepdim=True))
    return _ids(_keys(values, ids).sort(dim=-1, descending=True).values), sure


def _keys(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns int64 keys that are greater for a greater logit and, among equal logits, for a lower id."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two zeros are one value
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # float order as signed integer order
    return (ordered.long() << _ID_BITS) - ids


def _ids(keys: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_and(-keys, 2**_ID_BITS - 1)


def _best(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the ids of the `k` greatest keys of each row, greatest first."""
    return _ids(keys.topk(k, dim=-1).values)


def draw_dense(weights: torch.Tensor, lanes: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draws token ids [choices] from `weights` [lanes, padded vocabulary] float32; choice i draws from `lanes[i]`. It
    inverts the cumulative distribution in token-id order. A row that holds NaN yields some id inside it.

    The cumulative sum of a whole vocabulary is long, and in float32 its small steps drown. So each row is drawn from
    twice: first a block of the vocabulary by the blocks' masses, then a token in it by what is left of the uniform.
    Cumulative sums are float64, scaled by their own last value, so a uniform below 1 always finds a token of positive
    weight.
    """
    block, rest = invert(masses(weights)[lanes], uniform)
    offset, _ = invert(_blocks(weights)[lanes, block].double(), rest)
    return block * BLOCK + offset


def invert(weights: torch.Tensor, fraction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first index [n] at which the cumulative sum of `weights` [n, k] float64 exceeds `fraction` [n] of the
    total, and which fraction of that index's own weight was left, to draw on from inside it."""
    cdf = weights.cumsum(-1)
    total = cdf[:, -1]
    # The rest of a block may be rounded up to the whole block, which would be behind the last index.
    target = torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(-1)
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    weight = weights.gather(1, index)
    rest = (target - (cdf.gather(1, index) - weight)) / weight
    return index.squeeze(-1), rest.squeeze(-1).clamp_(min=0.0)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """[lanes, blocks, BLOCK]"""
    return weights.view(weights.shape[0], -1, BLOCK)


def masses(weights: torch.Tensor) -> torch.Tensor:
    """[lanes, blocks] float64"""
    return _blocks(weights).sum(-1).double()
