"""Counts the work of Python code in lines and calls instead of time.

A line counts each time that it runs, and so does each round of a loop within a line. Bytecodes would be finer, but
their number differs between versions of Python.

Work in C is not counted: `tuple(table)` is one line, however long the table is. `watch` therefore replaces the lists
that an object keeps by lists that loop, copy, slice, search and compare in Python, where the work is counted. Only the
elements that a list moves after an insertion are not counted, eight bytes each.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def lines(work: Callable[[], object]) -> int:
    """Returns the number of lines and calls. Garbage collection is off, because it could run finalizers of other
    tests."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> "TraceFunction":
        nonlocal count
        count += event in ("call", "line")
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


class _InPython:
    """A base class, before `list` or `tuple`, that does their loops in Python."""

    def __len__(self) -> int:
        return super().__len__()  # type: ignore[misc,no-any-return]

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        if isinstance(key, slice):
            return [self[i] for i in range(*key.indices(len(self)))]
        return super().__getitem__(key)  # type: ignore[misc]

    def __iter__(self) -> Iterator[Any]:
        i = 0
        while i < len(self):
            yield self[i]
            i += 1

    def __reversed__(self) -> Iterator[Any]:
        i = len(self)
        while i > 0:
            i -= 1
            yield self[i]

    def __contains__(self, item: object) -> bool:
        return any(one is item or one == item for one in self)

    def __eq__(self, other: object) -> bool:
        return [*self] == other or tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def copy(self) -> Any:
        return [*self]

    def index(self, item: object) -> int:
        return next(i for i, one in enumerate(self) if one == item)

    def remove(self, item: object) -> None:
        del self[self.index(item)]  # type: ignore[attr-defined]


class WatchedTuple(_InPython, tuple[Any, ...]):  # type: ignore[misc]
    pass


class WatchedList(_InPython, list[Any]):  # type: ignore[misc]
    def sort(self, **options: Any) -> None:
        self[:] = sorted(self, **options)


def watch(owner: object) -> None:
    """Watches every list that `owner` keeps, directly or through other objects of Motet."""
    _watch(owner, set())


def _watch(owner: object, visited: set[int]) -> None:
    if id(owner) in visited:
        return
    visited.add(id(owner))
    if isinstance(owner, dict):
        owner = list(owner.values())
    if isinstance(owner, list):
        for one in list.copy(owner):
            _watch(one, visited)
    elif type(owner).__module__.startswith("motet.") and hasattr(owner, "__dict__"):
        for name, value in list(vars(owner).items()):
            if type(value) is list:
                vars(owner)[name] = value = WatchedList(value)
            _watch(value, visited)
