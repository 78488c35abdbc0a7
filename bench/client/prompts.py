"""Makes prompts of an exact length with different beginnings, so that none is in a prefix cache."""

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
BEGINNING = 8
"""Number of tokens at the beginning that differ: less than a block of any cache."""


def seed_of_this_run() -> int:
    return secrets.randbits(32)


class FreshPrompts:
    """Makes prompts of `tokens`, repeated, each after a random beginning.

    A server that runs during several benchmarks still caches the prompts of the earlier ones, so each run needs a seed
    of its own.
    """

    def __init__(self, tokens: Sequence[int], *, seed: int) -> None:
        self._tokens = tokens
        self._distinct = sorted(set(tokens))
        self._dice = random.Random(seed)
        self._begun: set[tuple[int, ...]] = set()

    def next(self, length: int) -> list[int]:
        beginning = self._draw()
        while beginning in self._begun:
            beginning = self._draw()
        self._begun.add(beginning)
        return [*itertools.islice(itertools.chain(beginning, itertools.cycle(self._tokens)), length)]

    def _draw(self) -> tuple[int, ...]:
        return tuple(self._dice.choices(self._distinct, k=BEGINNING))
