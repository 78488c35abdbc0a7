"""The tokens of the fake vLLM server: a pure function of the tokens before them, so that equality is the oracle.

Each token is a hash of all tokens before it, of the prompt and of the output. So a choice that is resumed, with its
prompt and its output tokens, continues like an undisturbed choice. There are three kinds:

    greedy      the hash alone: all choices of a prompt are the same
    unseeded    the first token of the k-th choice of a prompt (k = 0, 1, ...) is a hash of the prompt and k; a prompt
                that ends in tokens that these servers have generated belongs to a resumed choice, and k is 0
    seeded      a token is a hash of the tokens before it, the seed and its position in this request; so a seeded choice
                that is resumed continues differently, as in vLLM, whose random generator starts again
"""

import struct
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

VOCAB_SIZE = 259
"""Number of tokens that it can generate: bytes and special tokens, as in the tiny tokenizer without its merges."""
KNOWN_TOKENS = 512
"""Number of tokens that a prompt can have. They include all tokens that the tiny tokenizer makes of texts."""
EOS = 0


def state_of(tokens: Sequence[int], state: int = 0) -> int:
    """Returns the state after these tokens; `state` is the state before them."""
    return zlib.crc32(struct.pack(f"<{len(tokens)}q", *tokens), state)


def token_at(state: int, *more: int, banned: Collection[int] = ()) -> int:
    """Returns the token after `state`, or the next one that is not banned."""
    token = state_of(more, state) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


@dataclass(frozen=True)
class Kind:
    """The way in which a choice is sampled."""

    seed: int | None = None
    number: int = 0
    """Number of an unseeded choice among the choices of its prompt; 0 for greedy and resumed choices."""
    wrong: bool = False
    """True if the choice reads another prompt's KV."""

    def token(self, state: int, position: int, banned: Collection[int] = ()) -> int:
        if self.wrong:
            return token_at(state, -1, banned=banned)
        if self.seed is not None:
            return token_at(state, self.seed, position, banned=banned)
        return token_at(state, *((self.number,) if self.number and position == 0 else ()), banned=banned)


def expected_tokens(prompt: Sequence[int], num_tokens: int, kind: Kind | None = None) -> list[int]:
    """Returns the first output tokens of a choice that ignores the end-of-sequence token, greedy by default."""
    kind, state, tokens = kind or Kind(), state_of(prompt), []
    for position in range(num_tokens):
        tokens.append(kind.token(state, position))
        state = state_of(tokens[-1:], state)
    return tokens


def is_continuation(prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Returns True if all tokens after the first are correct for an unseeded choice, no matter where it was resumed."""
    return all(
        token == token_at(state_of([*prompt, *tokens[:position]])) for position, token in enumerate(tokens) if position
    )


@dataclass
class SampledChoices:
    """Unseeded choices of each prompt, and the states after all generated tokens, on all servers of one test."""

    _started: Counter[int] = field(default_factory=Counter)
    _generated: set[int] = field(default_factory=set)

    def next_number(self, prompt_state: int) -> int:
        """Returns the `Kind.number` of a new unseeded choice."""
        if prompt_state in self._generated:
            return 0
        self._started[prompt_state] += 1
        return self._started[prompt_state] - 1

    def note_generated(self, state: int) -> None:
        self._generated.add(state)
