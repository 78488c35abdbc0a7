"""Makes prompts of an exact length that start differently, so that no prefix cache contains them."""

import itertools
import random
import secrets
from collections.abc import Sequence

TEXT = """\
A motet is a piece for several voices over one text. The voices begin together, each goes its own way, and what they \
share is written down once. In the thirteenth century a composer took a melody that everybody knew, laid it in long \
notes below, and gave each upper voice words and a rhythm of its own, so that the ear could follow one of them, or \
all of them, or the melody that carried them. Later the borrowed melody disappeared and the voices took turns in \
leading: one sang a phrase, the next answered a fifth above, and the third waited until the first had finished. \
"""
PREFIX_TOKENS = 8
"""Number of leading tokens that differ between prompts: less than a block of any cache."""


def new_seed() -> int:
    """Returns a seed for one run of a benchmark."""
    return secrets.randbits(32)


class FreshPrompts:
    """Makes prompts by repeating `tokens` after a random prefix.

    Each run needs a different seed: a server that runs during several benchmarks still caches the earlier prompts.
    """

    def __init__(self, tokens: Sequence[int], *, seed: int) -> None:
        self._tokens = tokens
        self._distinct = sorted(set(tokens))
        self._dice = random.Random(seed)
        self._used: set[tuple[int, ...]] = set()
        """Prefixes of all prompts so far."""

    def next(self, length: int) -> list[int]:
        prefix = self._sample()
        while prefix in self._used:
            prefix = self._sample()
        self._used.add(prefix)
        return [*itertools.islice(itertools.chain(prefix, itertools.cycle(self._tokens)), length)]

    def random(self, length: int) -> list[int]:
        """Returns random tokens of the text. They never repeat for long, so no cache contains a part of them."""
        return self._dice.choices(self._distinct, k=length)

    def words(self, count: int) -> str:
        """Returns random words of `TEXT`, which are about as many tokens."""
        return " ".join(self._dice.choices(TEXT.split(), k=count))

    def _sample(self) -> tuple[int, ...]:
        return tuple(self._dice.choices(self._distinct, k=PREFIX_TOKENS))
