"""Queues in order of age, and the groups that hold no blocks.

A waiting group is in one of three states:

    ready       The group waits for admission. Ready groups of one client are admitted in order of priority, then of
                finish tags (`clients`).
    following   The group waits for blocks that a running group computes (`sharing`). Younger groups can be admitted
                before it.
    woken       The group does not follow any more. It becomes ready again in one of the next steps.

A running group that loses all its blocks becomes ready again.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Generic, TypeVar

from motet.engines.native.scheduling.sharing import Sharing
from motet.engines.native.step.sequence import ChoiceSequence, Group

T = TypeVar("T", Group, ChoiceSequence)
_AGE = attrgetter("age")


class AgeOrdered(Generic[T]):
    """Groups or sequences in order of age, the oldest first."""

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

    def remove(self, item: T) -> None:
        """Raises ValueError if the item is not in the queue."""
        index = bisect_left(self._items, item.age, key=_AGE)
        if index == len(self._items) or self._items[index] is not item:
            raise ValueError(f"the queue has no such item of age {item.age}")
        del self._items[index]


QueueKey = tuple[int, str]
"""The priority and the client of groups that are admitted in order of finish tags."""


def queue_key(group: Group) -> QueueKey:
    return group.request.priority, group.request.client


def finish_order(group: Group) -> tuple[float, tuple[int, int]]:
    """Returns the sort key of groups with one `queue_key`."""
    return group.trunk.finish_tag, group.age


class ReadyGroups:
    """Ready groups of each priority and client, in order of finish tags. Only the first group of a queue can be
    admitted, so small groups do not starve a large one."""

    def __init__(self) -> None:
        self._queues: dict[QueueKey, list[Group]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Group]:
        for key in sorted(self._queues):
            yield from self._queues[key]

    def keys(self) -> Iterable[QueueKey]:
        return self._queues.keys()

    def first(self, key: QueueKey) -> Group | None:
        queue = self._queues.get(key)
        return queue[0] if queue else None

    def add(self, group: Group) -> None:
        insort(self._queues.setdefault(queue_key(group), []), group, key=finish_order)

    def remove(self, group: Group) -> None:
        """Raises ValueError if the group is not in the queue."""
        queue = self._queues.get(queue_key(group), [])
        index = bisect_left(queue, finish_order(group), key=finish_order)
        if index == len(queue) or queue[index] is not group:
            raise ValueError(f"group {group.request.request_id} is not ready")
        del queue[index]
        if not queue:
            del self._queues[queue_key(group)]


class GroupQueue:
    """The groups that hold no blocks. Owned by the scheduler."""

    def __init__(self, sharing: Sharing) -> None:
        self.ready = ReadyGroups()
        self._sharing = sharing
        self._woken: dict[Group, None] = {}
        """Woken groups, in the order in which they return to `ready`."""

    def all(self) -> list[Group]:
        return [*self.ready, *self._woken, *self._sharing.followers]

    def wake(self, followers: Iterable[Group]) -> None:
        """Adds groups that do not follow any more. They become ready in the next steps."""
        self._woken.update(dict.fromkeys(followers))

    def end_following(self, groups: Iterable[Group]) -> None:
        """Makes following groups ready in the next steps. They do not follow again."""
        for group in groups:
            group.followed, group.trunk.may_follow = None, False
            self.wake((group,))

    def requeue(self, max_groups: int) -> None:
        """Makes at most `max_groups` woken groups ready, so that the work of a step does not depend on their number."""
        for group in list(islice(self._woken, max_groups)):
            del self._woken[group]
            self.ready.add(group)

    def remove(self, group: Group) -> None:
        if group.followed is not None:
            group.followed = None
        elif group in self._woken:
            del self._woken[group]
        else:
            self.ready.remove(group)

    def check(self) -> None:
        """Raises AssertionError if a group that waits is admitted or holds blocks."""
        for group in self.all():
            group.check()
            if group.admitted:
                raise AssertionError("a group waits although it is admitted")
