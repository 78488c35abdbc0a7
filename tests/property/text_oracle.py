"""Computes what an answer must be from its complete text at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

S = TypeVar("S", str, tuple[int, ...])


@dataclass(frozen=True)
class Found:
    """A stop string at [start, end) of a text."""

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


def cut(whole: S, places: Sequence[int]) -> list[S]:
    """Cuts `whole` at the given places."""
    edges = sorted({0, len(whole), *(p for p in places if p < len(whole))})
    return [whole[a:b] for a, b in pairwise(edges)]
