"""Which tokens the grammars of a step's choices allow, as bits."""

from collections.abc import Sequence

import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from motet.errors import GrammarError
from motet.grammar.compiled import Matcher


def mask_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def fill_masks(matchers: Sequence[Matcher], out: NDArray[np.int32]) -> dict[int, GrammarError]:
    """Row i of `out` becomes what matcher i allows: bit `t % 32` of word `t // 32` is token t.

    `out`: [len(matchers) or more, mask_words(vocab_size)] int32, contiguous. All matchers are of one model. One
    after the other: a mask takes microseconds, and handing them to other threads pays from 64 on at best.

    Returns those that failed, as row -> why: a grammar that became too much work fails its own choice only. Such a
    row is worth nothing.
    """
    if not matchers:
        return {}
    words = matchers[0].mask_words
    # A model without end-of-sequence has one made up behind its last id, at times in a word that `out` does not have.
    masks = out if words == out.shape[1] else np.zeros((len(matchers), words), np.int32)
    for row, matcher in enumerate(matchers):
        fill_next_token_bitmask(matcher.inner, masks, row)
    if masks is not out:
        out[: len(matchers)] = masks[:, : out.shape[1]]
    return {row: matcher.failure() for row, matcher in enumerate(matchers) if matcher.inner.is_error()}
