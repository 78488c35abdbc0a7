"""Groups that wait for room: by priority, then by arrival."""

from bisect import insort
from collections.abc import Iterator

from motet.engines.native.sequence import Group


class WaitingGroups:
    """A sorted queue; strictly in order, so that a large group is not starved by small ones behind it."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def add(self, group: Group) -> None:
        insort(self._groups, group, key=lambda waiting: waiting.age)

    def first(self) -> Group | None:
        return self._groups[0] if self._groups else None

    def remove(self, group: Group) -> None:
        self._groups.remove(group)
