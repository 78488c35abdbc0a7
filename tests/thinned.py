"""`make check` and `make test` run a part of the cases of a test that has many parameters, and `make test-long` all.

- Of a test with several `parametrize` marks, each value of each mark runs, and not all combinations. Where the
  combinations matter, one mark lists them.
- Of these cases, and of the cases of a single mark, at most the number in `MAX_CASES` run, at equal distances.

The choice depends on the test's name and parameters only, so every process of a run makes the same choice.
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from zlib import crc32

import pytest
from hypothesis import settings


@dataclass(frozen=True)
class MaxCases:
    """Maximum number of cases of one test. Most async tests start a server."""

    plain: int
    asynchronous: int
    slow: int


MAX_CASES = {"quick": MaxCases(plain=8, asynchronous=2, slow=4), "all": MaxCases(plain=40, asynchronous=6, slow=4)}
"""Maximum for each profile of `tests.property_settings`. The profile `long` has none."""
NEVER_THINNED = ("every_case", "gpu", "clients")
"""Marks of tests whose cases all run. Neither command runs tests with the last two marks."""

Values = tuple[Hashable, ...]
"""The value of each mark in one case."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the other cases, after pytest has deselected tests by their marks."""
    limits = MAX_CASES.get(settings.get_current_profile_name())
    if limits is None:
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = {item for name, of_test in cases.items() for item in part_of(of_test, name, limits)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def part_of(cases: Sequence[pytest.Item], name: str, limits: MaxCases) -> list[pytest.Item]:
    """Returns the cases of one test that run."""
    if len(cases) == 1 or any(cases[0].get_closest_marker(mark) for mark in NEVER_THINNED):
        return list(cases)
    if any(case.get_closest_marker("slow") for case in cases):
        limit = limits.slow
    elif inspect.iscoroutinefunction(getattr(cases[0], "obj", None)):
        limit = limits.asynchronous
    else:
        limit = limits.plain
    return [cases[place] for place in chosen_places([values_of(case) for case in cases], name, limit)]


def values_of(case: pytest.Item) -> Values:
    """Returns the value of each `parametrize` mark, and of each parameter of a fixture, by the object's identity."""
    callspec = getattr(case, "callspec", None)
    params = dict(callspec.params) if callspec else {}
    values = [
        tuple(id(params.pop(name)) for name in names_of(mark) if name in params)
        for mark in case.iter_markers("parametrize")
    ]
    return (*values, *(id(value) for value in params.values()))


def names_of(mark: pytest.Mark) -> list[str]:
    """Returns the names of the parameters of a `parametrize` mark."""
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def chosen_places(cases: Sequence[Values], name: str, limit: int) -> list[int]:
    """Returns the places of the chosen cases, ascending."""
    places = each_value_once(cases)
    step = -(-len(places) // limit)
    return places[crc32(name.encode()) % step :: step]


def each_value_once(cases: Sequence[Values]) -> list[int]:
    """Returns the places of cases that have every value of every mark. Chooses greedily: no other case would have more
    new values, and among equals the values that were chosen least often come first."""
    together = [set(enumerate(case)) for case in cases]
    missing = set[tuple[int, Hashable]]().union(*together)
    chosen: Counter[tuple[int, Hashable]] = Counter()
    places = []

    def worth(place: int) -> tuple[int, int]:
        return len(missing & together[place]), -sum(chosen[value] for value in together[place])

    while missing:
        best = max(range(len(cases)), key=worth)
        places.append(best)
        missing -= together[best]
        chosen.update(together[best])
    return sorted(places)
