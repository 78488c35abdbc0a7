"""Log-probabilities of sampled tokens and of top tokens.

`prompt_logprobs` and `token_logprobs` use the model's raw logits, before temperature, penalties and filters. `score`
accepts any logits, for example the processed logits from which a token is sampled.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motet.engines.native.sample.candidates import top_tokens
from motet.engines.native.sample.edits import LogitsScratch
from motet.engines.native.sample.lanes import uploaded_ids
from motet.types import SamplingParams, TokenLogprob


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, target_ids: Sequence[int], *, k: int, named: Sequence[int] = ()
) -> list[TokenLogprob]:
    """Returns the log-probability of `target_ids[i]`, the top `k`, and the tokens `named`, in row i of `logits` [rows,
    vocab_size]."""
    scratch = LogitsScratch(logits.shape[1], logits.device, max_rows=len(target_ids))
    targets = uploaded_ids(target_ids, logits.device)
    same = uploaded_ids(named, logits.device).expand(len(target_ids), len(named))
    packed = token_logprobs(scratch, logits, rows=range(len(target_ids)), token_ids=targets, named=same, k=k)
    return [
        unpack(token_id, row, k=k, named=named, num_named=len(named))
        for token_id, row in zip(target_ids, packed.tolist(), strict=True)
    ]


def token_logprobs(
    scratch: LogitsScratch, logits: Tensor, *, rows: Sequence[int], token_ids: Tensor, named: Tensor, k: int
) -> Tensor:
    """Scores `token_ids[i]` and `named[i]` in the logits `logits[rows[i]]`, for `token_ids` [tokens] int64 and `named`
    [tokens, m] int64.

    Returns one row per token, [tokens, 2 + m + 2k] float64, which represents all values exactly: log-probability, rank,
    log-probabilities of the m named tokens, ids of the top k tokens, log-probabilities of the top k tokens. k is at
    most the vocabulary size. Everything stays on the device."""
    k = min(k, logits.shape[1])
    parts = [torch.empty(0, 2 + named.shape[1] + 2 * k, dtype=torch.float64, device=logits.device)]
    for start in range(0, len(rows), scratch.capacity):
        some = rows[start : start + scratch.capacity]
        places = {row: place for place, row in enumerate(dict.fromkeys(some))}
        x = scratch.load(logits, list(places))
        place_of_token = uploaded_ids([places[row] for row in some], x.device)
        tokens, some_named = token_ids[start : start + scratch.capacity], named[start : start + scratch.capacity]
        one_each = len(places) == len(some)
        parts.append(
            score(x, place_of_token, tokens, one_each=one_each, named=some_named, k=k, spare=scratch.spare_like(x))
        )
    return torch.cat(parts)


def score(
    x: Tensor, rows: Tensor, token_ids: Tensor, *, one_each: bool, named: Tensor, k: int, spare: Tensor
) -> Tensor:
    """Scores tokens in the logits `x[rows]` and returns the same columns as `token_logprobs`. Overwrites `x` [lanes,
    width] float32 and `spare`, of the same shape. `one_each`: True if `rows` are all rows of `x` in their order."""
    logprobs = torch.log_softmax(x, -1, out=spare)
    logprob = logprobs[rows, token_ids]
    top_ids = top_tokens(x, k)
    top_logprobs = logprobs.gather(1, top_ids)
    chosen = x[rows, token_ids].unsqueeze(1)
    per_token = x if one_each else x[rows]
    rank = 1 + per_token.gt_(chosen).sum(-1, keepdim=True)  # exact, and faster than a sum of booleans
    columns = (logprob[:, None], rank, logprobs[rows.unsqueeze(1), named], top_ids[rows], top_logprobs[rows])
    return torch.cat([column.double() for column in columns], dim=1)


def unpack(
    token_id: int, packed: Sequence[float], *, k: int, named: Sequence[int] = (), num_named: int = 0
) -> TokenLogprob:
    """Unpacks one row of `token_logprobs` with `num_named` columns for named tokens that start with `named`.
    The result lists the top `k` tokens and, if there are named tokens, then the token itself and these."""
    rank, first = int(packed[1]), 2 + num_named
    width = (len(packed) - first) // 2
    k = min(k, width)
    top = zip(map(int, packed[first : first + k]), packed[first + width : first + width + k], strict=True)
    if named:
        others = {token_id: packed[0]} | dict(zip(named, packed[2:first], strict=False))
        return TokenLogprob(token_id, packed[0], rank, tuple((dict(top) | others).items()))
    return TokenLogprob(token_id, packed[0], rank, tuple(top))


def named_ids(params_of: Sequence[SamplingParams]) -> npt.NDArray[np.int64]:
    """Returns the `logprob_token_ids` of each choice, [choices, m] int64, padded with 0 to the longest."""
    named = np.zeros(
        (len(params_of), max((len(params.logprob_token_ids) for params in params_of), default=0)), np.int64
    )
    for row, params in zip(named, params_of, strict=True):
        row[: len(params.logprob_token_ids)] = params.logprob_token_ids
    return named
