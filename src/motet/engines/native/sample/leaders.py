"""The best k tokens of a row in one fixed order: higher logit first, lower id first among equals.

Logits come in bf16, where equal values are everywhere, and `topk` picks among equals as it pleases. So what is sorted
here are integer keys (logit, then id), which never tie; and there are two ways to have few of them to sort:

- A few leaders are looked for in blocks of the vocabulary. The best k tokens lie in the k blocks with the best maxima,
  since each of these blocks holds a token that is at least as good as any token of the other blocks (and has a lower
  id where the two are equal).
- Many leaders are taken by `topk` and sorted again. Which of the tokens that equal the last one were taken is chance,
  so only those in front of them are sure.
"""

import torch

_BLOCK = 64
_MIN_BLOCKS_PER_LEADER = 16
_ID_BITS = 32
_FEW = 64  # up to here blocks win over `topk`


def leaders(x: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [lanes, k] int64 of the best `k` tokens of `x` [lanes, width] float32, best first.

    `width` is a multiple of 64 and at least `k`; where a row holds NaN, its result is of no use.
    """
    lanes, width = x.shape
    block = _BLOCK
    while block > 1 and width // block < _MIN_BLOCKS_PER_LEADER * k:
        block //= 2
    blocks = x.view(lanes, width // block, block)
    ids = torch.arange(width, device=x.device).view(-1, block)
    if block > 1:
        chosen = _best(_keys(blocks.amax(-1), ids[:, 0]), k) // block  # [lanes, k]
        blocks = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, block))  # [lanes, k, block]
        ids = ids[chosen]
    return _best(_keys(blocks, ids).flatten(1), k)


def leaders_surely(x: torch.Tensor, k: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `leaders`, but fast for any `k`; also how many of them [lanes, 1], from the front, are surely right.

    All are if `k` is small or the whole `vocab_size`; what lies beyond that in a row is -inf.
    """
    if k == vocab_size:
        ids = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return ids, ids.new_full((len(ids), 1), k)
    if k <= _FEW:
        ids = leaders(x, k)
        return ids, ids.new_full((len(ids), 1), k)
    values, ids = x.topk(k, dim=-1)
    sure = (values > values[:, -1:]).sum(-1, keepdim=True)
    return _ids(_keys(values, ids).sort(dim=-1, descending=True).values), sure


def _keys(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that are greater for a greater logit and, among equal logits, for a lower id."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two zeros are one value
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # float order as signed integer order
    return (ordered.long() << _ID_BITS) - ids


def _ids(keys: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_and(-keys, 2**_ID_BITS - 1)


def _best(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the `k` greatest keys of each row, greatest first."""
    return _ids(keys.topk(k, dim=-1).values)
