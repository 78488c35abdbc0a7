"""Grids of parameters: in `make test` every two values of different axes occur together, or each value occurs once.
In `make test-long` all combinations occur."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two values that occur together, each given as its axis and its place there."""


def pairwise(*axes: Sequence[Any]) -> list[pytest.ParameterSet]:
    """Returns every combination of the axes' values, in order. A combination is marked `long` if the others have all
    its pairs of values. A value can be a `pytest.param` with marks of its own."""
    every = list(product(*(range(len(axis)) for axis in axes)))
    chosen = covering(every)
    return [
        parameter([axis[place] for axis, place in zip(axes, places, strict=True)], long=places not in chosen)
        for places in every
    ]


def each_once(*axes: Sequence[Any]) -> list[pytest.ParameterSet]:
    """Returns every combination of the axes' values, in order. All are marked `long` except the first one with each
    value of the longest axis, together with the next value of every other axis."""
    longest = max(map(len, axes))
    chosen = {tuple(number % len(axis) for axis in axes) for number in range(longest)}
    return [
        parameter([axis[place] for axis, place in zip(axes, places, strict=True)], long=places not in chosen)
        for places in product(*(range(len(axis)) for axis in axes))
    ]


def covering(every: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Chooses greedily: no other combination would have more new pairs than the next one."""
    missing = {pair for places in every for pair in pairs(places)}
    chosen = set()
    while missing:
        best = max(every, key=lambda places: len(missing & pairs(places)))
        chosen.add(best)
        missing -= pairs(best)
    return chosen


def pairs(places: Iterable[int]) -> set[Pair]:
    return set(combinations(enumerate(places), 2))


def parameter(values: Iterable[Any], *, long: bool) -> pytest.ParameterSet:
    given = [value if isinstance(value, pytest.ParameterSet) else pytest.param(value) for value in values]
    marks = [mark for one in given for mark in one.marks]
    name = "-".join(str(one.id or one.values[0]) for one in given)
    return pytest.param(
        *(one.values[0] for one in given), marks=[*marks, *([pytest.mark.long] if long else [])], id=name
    )
