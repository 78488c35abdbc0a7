"""Generates texts that a grammar allows from its masks, with a vocabulary of bytes and tags."""

import random
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

EOS = 256


class _Bytes:
    """A vocabulary of the 256 bytes, an end token, and the tags as special tokens."""

    bos_token_id = None
    eos_token_id = EOS

    def __init__(self, tags: Sequence[str]) -> None:
        self.tokens = [*(bytes([i]) for i in range(256)), b"<eos>", *(tag.encode() for tag in tags)]
        self.special_token_ids = list(range(EOS, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Walker:
    """Generates texts of one grammar, for a model whose vocabulary has `tags` as special tokens."""

    def __init__(self, lark: str, tags: Sequence[str] = ()) -> None:
        self._tags = {tag: EOS + 1 + i for i, tag in enumerate(tags)}
        self._num_tokens = EOS + 1 + len(tags)
        tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(tags)), n_vocab=self._num_tokens, eos_token=[EOS])
        self._start = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark))
        if self._start.is_error():
            raise ValueError(self._start.get_error())

    def allows(self, text: str) -> bool:
        """Returns True if `text` is a complete answer that the grammar allows."""
        matcher, ids = self._start.deep_copy(), self._ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(
        self, rng: random.Random, *, start: str = "", preferred: Sequence[str] = (), max_tokens: int = 2000
    ) -> str | None:
        """Returns `start` with a random continuation, which contains `preferred` texts where they are allowed. Returns
        None if the text does not end within `max_tokens`."""
        matcher, tokens = self._start.deep_copy(), self._ids(start)
        if matcher.try_consume_tokens(tokens) != len(tokens):
            raise ValueError(f"{start!r} is not allowed")
        while len(tokens) < max_tokens:
            allowed = self._allowed(matcher)
            if allowed == [EOS] or (EOS in allowed and rng.random() < 0.6):
                return self._text(tokens)
            if preferred and rng.random() < 0.2:
                ids = self._ids(rng.choice(preferred))
                num_consumed = matcher.try_consume_tokens(ids)
                tokens += ids[:num_consumed]
            else:
                tokens.append(rng.choice([token for token in allowed if token != EOS]))
                matcher.consume_token(tokens[-1])
        return None

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        """Returns the allowed tokens, if possible without bytes of longer characters, which only `preferred` texts
        contain."""
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(self._num_tokens) if mask[token // 8] >> (token % 8) & 1]
        return [token for token in allowed if token < 128 or token >= EOS] or allowed

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            tag = next((tag for tag in self._tags if text.startswith(tag)), None)
            ids += [self._tags[tag]] if tag else text[0].encode()
            text = text[len(tag) if tag else 1 :]
        return ids

    def _text(self, ids: Sequence[int]) -> str:
        names = {token: tag.encode() for tag, token in self._tags.items()}
        return b"".join(names.get(token) or bytes([token]) for token in ids).decode()
