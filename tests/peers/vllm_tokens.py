"""The tokens of the played vLLM: a pure function of those before, so that equality is the oracle.

Each token is a hash of all tokens before it, prompt and written ones. So a choice that is asked for again, with its
prompt and what was written, goes on as the undisturbed one would. Three kinds differ in how they begin:

    greedy      the hash alone: all choices of a prompt are the same
    unseeded    the first token is drawn: the k-th choice over one prompt (k = 0, 1, ...) begins with a hash of the
                prompt and k; a prompt that ends in tokens written here is a choice that goes on, and nothing is drawn
    seeded      a token is a hash of those before, the seed and its place in this request; so a seeded choice that is
                resumed goes on differently, as with vLLM, whose generator starts anew
"""

import struct
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

VOCAB_SIZE = 259
"""Tokens that it may write: bytes and special ones, as in the tiny tokenizer without its merges."""
KNOWN_TOKENS = 512
"""Tokens that it may read. They include all that the tiny tokenizer makes of texts."""
EOS = 0


def state_of(tokens: Sequence[int], state: int = 0) -> int:
    """Returns the state after these tokens; `state` is the one before them."""
    return zlib.crc32(struct.pack(f"<{len(tokens)}q", *tokens), state)


def token_at(state: int, *more: int, banned: Collection[int] = ()) -> int:
    """Returns the token after `state`, or the next one that is not banned."""
    token = state_of(more, state) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


@dataclass(frozen=True)
class Kind:
    """How a choice is sampled."""

    seed: int | None = None
    draw: int = 0
    """It is 0 also for greedy choices and for those that go on."""
    wrong: bool = False
    """True if the choice reads another prompt's KV."""

    def token(self, state: int, place: int, banned: Collection[int] = ()) -> int:
        if self.wrong:
            return token_at(state, -1, banned=banned)
        if self.seed is not None:
            return token_at(state, self.seed, place, banned=banned)
        return token_at(state, *((self.draw,) if self.draw and place == 0 else ()), banned=banned)


def written(prompt: Sequence[int], num_tokens: int, kind: Kind | None = None) -> list[int]:
    """Returns the first tokens of a choice that ignores the end of sequence, greedy by default."""
    kind, state, tokens = kind or Kind(), state_of(prompt), []
    for place in range(num_tokens):
        tokens.append(kind.token(state, place))
        state = state_of(tokens[-1:], state)
    return tokens


def goes_on(prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Returns True if an unseeded choice is right after its first token, wherever and however often it was resumed."""
    return all(token == token_at(state_of([*prompt, *tokens[:place]])) for place, token in enumerate(tokens) if place)


@dataclass
class Draws:
    """The unseeded choices that began, and everything that was written, on all servers of one test."""

    _drawn: Counter[int] = field(default_factory=Counter)
    _written: set[int] = field(default_factory=set)

    def draw(self, prompt_state: int) -> int:
        if prompt_state in self._written:
            return 0
        self._drawn[prompt_state] += 1
        return self._drawn[prompt_state] - 1

    def wrote(self, state: int) -> None:
        self._written.add(state)
