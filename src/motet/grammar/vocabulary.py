"""A model's vocabulary as llguidance wants it: the bytes of every token, and which of them are no text.

The model's own count of ids is what the logits have, so it is what the masks have. Ids past the tokenizer's entries
stand for nothing and are never allowed; entries past the model's ids do not exist.
"""

import re
from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from motet.text.tokenizer import Tokenizer


class _Entries:
    """What `TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._in_tags = re.compile("|".join(_behind_first_character(tag) for tag in tokenizer.special_tokens) or "(?!)")
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Asked where a grammar leaves only one text. That of a special token is text all the same: it is cut, as the
        tokenizer would make the token of it."""
        plain = text if isinstance(text, str) else text.decode(errors="replace")
        pieces = self._in_tags.split(plain)
        return [token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False)]


def _behind_first_character(tag: str) -> str:
    return f"(?<={re.escape(tag[:1])})(?={re.escape(tag[1:])})" if len(tag) > 1 else "(?!)"


def build_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """About a tenth of a second for 50,000 entries.

    For a model without end-of-sequence one is made up behind its last id. A mask has no bit for it, so where a grammar
    allows nothing else the mask is empty.
    """
    eos = [token for token in eos_token_ids if token < vocab_size] or [vocab_size]
    size = max(vocab_size, eos[0] + 1)
    known = min(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (size - known)
    special = sorted({token for token in tokenizer.special_ids if token < known} | set(eos))
    for token in eos:
        tokens[token] = tokens[token] or b"<eos>"
    return LLTokenizer(TokenizerWrapper(_Entries(tokenizer, tokens, special, eos[0])), n_vocab=size, eos_token=eos)
