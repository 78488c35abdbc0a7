"""Computes the expected answer from the complete text at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

S = TypeVar("S", str, tuple[int, ...])


@dataclass(frozen=True)
class Found:
    """A stop string in a text, from `start` to `end` (exclusive)."""

    stop: str
    start: int
    end: int


def first_stop(text: str, stops: Sequence[str], *, after: int = 0) -> Found | None:
    """Returns the stop string that is complete first after position `after`, and the longest if several are."""
    found = [
        Found(stop, end - len(stop), end)
        for stop in stops
        for end in range(max(len(stop), after + 1), len(text) + 1)
        if text.endswith(stop, 0, end)
    ]
    return min(found, key=lambda f: (f.end, f.start), default=None)


def cut(text: S, positions: Sequence[int]) -> list[S]:
    """Returns the pieces of a text or of tokens that is cut at these positions."""
    edges = sorted({0, len(text), *(position for position in positions if position < len(text))})
    return [text[start:end] for start, end in pairwise(edges)]
