"""The top tokens of a row in a fixed order (`top_tokens`), and sampling with a uniform number (`sample_dense`)."""

import torch
from torch import Tensor

_SEARCH_BLOCK = 64
_MIN_BLOCKS_PER_TOKEN = 16
_ID_BITS = 32
_MAX_FROM_BLOCKS = 64  # up to this k, `top_tokens` is faster than `topk`
BLOCK = 256
"""Rows are padded to a multiple of this number of tokens, with tokens of weight 0."""


def top_tokens(x: Tensor, k: int) -> Tensor:
    """Returns the ids [lanes, k] int64 of the top `k` tokens of `x` [lanes, width] float32: by descending logit, and by
    ascending id for equal logits. `width` is a multiple of 64 and at least `k`. The result for a row with NaN is
    meaningless.

    The logits of bf16 models contain many equal values, for which the order of `topk` is not defined. The function
    therefore sorts integer keys made of logit and id, which are all different. If `k` is small, it searches blocks of
    the vocabulary: the top k tokens are in the k blocks with the greatest maxima, since each of these has a token that
    comes before all tokens of the other blocks."""
    lanes, width = x.shape
    block = _SEARCH_BLOCK
    while block > 1 and width // block < _MIN_BLOCKS_PER_TOKEN * k:
        block //= 2
    blocks = x.view(lanes, width // block, block)
    ids = torch.arange(width, device=x.device).view(-1, block)
    if block > 1:
        chosen = _best(_keys(blocks.amax(-1), ids[:, 0]), k) // block  # [lanes, k]
        blocks = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, block))  # [lanes, k, block]
        ids = ids[chosen]
    return _best(_keys(blocks, ids).flatten(1), k)


def top_tokens_and_num_exact(x: Tensor, k: int, *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Returns the ids [lanes, k] int64 of the top `k` tokens, fast for any `k`, and num_exact [lanes, 1] int64: the ids
    in [0, num_exact) of a lane are exactly the first ids of `top_tokens`.

    num_exact is `k` if `k` is small or equals `vocab_size`; all logits after `vocab_size` are -inf. For any other `k`,
    `topk` selects the tokens, which are then sorted. Among tokens with the same logit as the last one, its selection is
    undefined. This does not matter if that logit is -inf, because these tokens have weight 0."""
    if k == vocab_size:
        ids = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return ids, ids.new_full((len(ids), 1), k)
    if k <= _MAX_FROM_BLOCKS:
        ids = top_tokens(x, k)
        return ids, ids.new_full((len(ids), 1), k)
    values, ids = x.topk(k, dim=-1)
    last = values[:, -1:]
    num_exact = torch.where(last == -torch.inf, k, (values > last).sum(-1, keepdim=True))
    return _ids(_keys(values, ids).sort(dim=-1, descending=True).values), num_exact


def _keys(x: Tensor, ids: Tensor) -> Tensor:
    """Returns int64 keys that are greater for a greater logit and, for equal logits, for a lower id."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, so both zeros have the same key
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the order of floats as the order of signed integers
    return (ordered.long() << _ID_BITS) - ids


def _ids(keys: Tensor) -> Tensor:
    return torch.bitwise_and(-keys, 2**_ID_BITS - 1)


def _best(keys: Tensor, k: int) -> Tensor:
    """Returns the ids [rows, k] of the `k` greatest keys of each row, by descending key."""
    return _ids(keys.topk(k, dim=-1).values)


def sample_dense(weights: Tensor, lanes: Tensor, uniform: Tensor) -> Tensor:
    """Samples token ids [choices] int64 by the inverse CDF in token-id order; choice i samples from row `lanes[i]` of
    `weights` [lanes, padded vocabulary] float32. A row with NaN gives an arbitrary id within the row.

    In a float32 cumulative sum over the complete vocabulary, small weights would be lost to rounding. The uniform
    therefore first selects a block of the vocabulary by the blocks' masses, and its remainder a token in the block.
    Sums are float64 and scaled by their last value, so a uniform below 1 always selects a token of positive weight."""
    block, rest = invert(masses(weights)[lanes], uniform)
    offset, _ = invert(_blocks(weights)[lanes, block].double(), rest)
    return block * BLOCK + offset


def invert(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first index [n] int64 at which the cumulative sum of `weights` [n, k] float64 exceeds `fraction` [n]
    of the total, and the remaining fraction [n] float64 of the weight at this index, for sampling within it."""
    cdf = weights.cumsum(-1)
    total = cdf[:, -1]
    # The remaining fraction of a block can be rounded up to 1, which would be after the last index.
    target = torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(-1)
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    weight = weights.gather(1, index)
    rest = (target - (cdf.gather(1, index) - weight)) / weight
    return index.squeeze(-1), rest.squeeze(-1).clamp_(min=0.0)


def _blocks(weights: Tensor) -> Tensor:
    """Returns a view [lanes, blocks, BLOCK]."""
    return weights.view(weights.shape[0], -1, BLOCK)


def masses(weights: Tensor) -> Tensor:
    """Returns the sums of the weights of each block, [lanes, blocks] float64."""
    return _blocks(weights).sum(-1).double()
