"""Prompts of an exact length, each with another beginning, so that no prefix cache helps one with another."""

import itertools
from collections.abc import Iterator, Sequence

TEXT = """\
A motet is a piece for several voices over one text. The voices begin together, each goes its own way, and what they \
share is written down once. In the thirteenth century a composer took a melody that everybody knew, laid it in long \
notes below, and gave each upper voice words and a rhythm of its own, so that the ear could follow one of them, or \
all of them, or the melody that carried them. Later the borrowed melody disappeared and the voices took turns in \
leading: one sang a phrase, the next answered a fifth above, and the third waited until the first had finished. \
"""


def prompts(tokens: Sequence[int], length: int) -> Iterator[list[int]]:
    """Prompts of `length` tokens, more than anybody needs: two that differ each time, then `tokens` over and over."""
    for first, second in itertools.permutations(dict.fromkeys(tokens), 2):
        yield [first, second, *itertools.islice(itertools.cycle(tokens), length - 2)]
