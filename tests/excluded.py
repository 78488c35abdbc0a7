"""Modules and tests with a mark that the command line excludes, as in `-m "not slow"`, are not collected.

pytest imports every module, and makes an item for each case of each test, before it reads the marks. In `make check` a
fifth of the modules and a half of the cases would be deselected then.
"""

import re
from pathlib import Path

import pytest

EXCLUDED = pytest.StashKey[frozenset[str]]()
EXCLUSION = re.compile(r"not (\w+)")
MODULE_MARKS = re.compile(r"^pytestmark = (.*)", re.MULTILINE)
MARK = re.compile(r"pytest\.mark\.(\w+)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[EXCLUDED] = excluded_by(config.option.markexpr)


def excluded_by(expression: str) -> frozenset[str]:
    """Returns the marks that each exclude a test that has them. The set is empty if `expression` is not of the
    form `not a and not b`."""
    exclusions = [EXCLUSION.fullmatch(part.strip()) for part in expression.split(" and ")]
    names = [exclusion[1] for exclusion in exclusions if exclusion]
    return frozenset(names if len(names) == len(exclusions) else ())


def marks_of_module(text: str) -> set[str]:
    """Returns the marks that a module sets for all its tests in one line."""
    return {name for line in MODULE_MARKS.findall(text) for name in MARK.findall(line)}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    excluded = config.stash[EXCLUDED]
    is_module = excluded and collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_module and not excluded.isdisjoint(marks_of_module(collection_path.read_text())) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    excluded = collector.config.stash[EXCLUDED]
    marks = getattr(obj, "pytestmark", ()) if excluded and name.startswith("test") else ()
    return [] if any(mark.name in excluded for mark in marks) else None
