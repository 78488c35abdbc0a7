"""Log-probabilities of the model itself: of the raw logits, before temperature, penalties and filters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from motet.engines.native.sample.leaders import leaders
from motet.engines.native.sample.scratch import Scratch
from motet.types import TokenLogprob


@dataclass(frozen=True)
class Scores:
    """Figures of some tokens, one row each, still on the device."""

    logprob: torch.Tensor
    """[tokens] float32"""
    rank: torch.Tensor
    """[tokens]: 1 + how many logits are greater"""
    top_ids: torch.Tensor
    """[tokens, k] int64, best first; the lower id first among equals"""
    top_logprobs: torch.Tensor
    """[tokens, k] float32"""

    def packed(self) -> torch.Tensor:
        """[tokens, 2 + 2k] float64, which holds all of them exactly."""
        columns = (self.logprob[:, None], self.rank[:, None], self.top_ids, self.top_logprobs)
        return torch.cat([column.double() for column in columns], dim=1)


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, target_ids: Sequence[int], k: int) -> list[TokenLogprob]:
    """Scores `target_ids[i]` under row i of `logits` [rows, vocabulary], with the best `k` tokens of each row."""
    vocab_size = logits.shape[1]
    scratch = Scratch(vocab_size, logits.device)
    targets = torch.tensor(target_ids, dtype=torch.int64, device=logits.device)
    packed = token_logprobs(scratch, logits, range(len(target_ids)), targets, min(k, vocab_size))
    return [unpack(token_id, row, k) for token_id, row in zip(target_ids, packed.tolist(), strict=True)]


def token_logprobs(
    scratch: Scratch, logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, k: int
) -> torch.Tensor:
    """Packed scores [tokens, 2 + 2k] of `token_ids` [tokens], token i under `logits[rows[i]]`."""
    parts = [torch.empty(0, 2 + 2 * k, dtype=torch.float64, device=logits.device)]
    for start in range(0, len(rows), scratch.capacity):
        some = rows[start : start + scratch.capacity]
        distinct = list(dict.fromkeys(some))
        x = scratch.load(logits, distinct)
        places = {row: place for place, row in enumerate(distinct)}
        place_of = torch.tensor([places[row] for row in some], device=x.device)
        scores = score(x, place_of, token_ids[start : start + scratch.capacity], k)
        parts.append(scores.packed())
    return torch.cat(parts)


def score(x: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, k: int) -> Scores:
    """Scores `token_ids` [tokens] under `x[rows]`; `x` [any, width] float32, -inf beyond the vocabulary."""
    logprobs = torch.log_softmax(x, -1)
    chosen = x[rows, token_ids].unsqueeze(-1)
    above = torch.empty(len(rows), x.shape[1], device=x.device)  # floats are added up faster than booleans
    torch.gt(x[rows], chosen, out=above)
    top_ids = leaders(x, k)
    top_logprobs = logprobs.gather(1, top_ids)
    return Scores(logprobs[rows, token_ids], 1 + above.sum(-1), top_ids[rows], top_logprobs[rows])


def unpack(token_id: int, packed: Sequence[float], k: int) -> TokenLogprob:
    """One row of packed scores, cut down to the best `k` tokens."""
    width = (len(packed) - 2) // 2
    k = min(k, width)
    top = zip(map(int, packed[2 : 2 + k]), packed[2 + width : 2 + width + k], strict=True)
    rank = packed[1]
    return TokenLogprob(token_id, packed[0], int(rank), tuple(top))
