"""Groups or sequences in order of age, oldest first: who waits, who runs, who was preempted."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Aged(Protocol):
    @property
    def age(self) -> tuple[int, ...]:
        """Smaller is older; does not change, and no two are equal."""
        ...


T = TypeVar("T", bound=Aged)
_AGE = attrgetter("age")


class ByAge(Generic[T]):
    """A sorted list: whoever comes back stands where it stood. A queue is served strictly in order, so that a large
    group is not starved by small ones behind it."""

    def __init__(self) -> None:
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        insort(self._items, item, key=_AGE)

    def oldest(self) -> T | None:
        return self._items[0] if self._items else None

    def youngest(self) -> T | None:
        return self._items[-1] if self._items else None

    def remove(self, item: T) -> None:
        """ValueError if it is not there."""
        index = bisect_left(self._items, item.age, key=_AGE)
        if index == len(self._items) or self._items[index] is not item:
            raise ValueError(f"nothing of age {item.age} is here")
        del self._items[index]
