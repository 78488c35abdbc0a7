"""Orders groups that wait for capacity: small ones can overtake, and no large one starves. Pure: time is an argument.

    order      priority (lower first), then tag = arrival + head start (n), then arrival
               head start (n) = the smaller of n x PER_CHOICE_S and MAX_HEAD_START_S, which other groups have over a
               group of n choices
    capacity   the first group in order that fits starts. A group that did not fit can be overtaken for PATIENCE_S more;
               after that, no later group that needs the same capacity starts before it
    lanes      items of one lane need the same capacity; `share_capacity` says which lanes need the same

This is fair queueing (Demers, Keshav, Shenker, 1989) with the arrival time instead of virtual time, which gives simple
bounds. Among equal priorities, a group that arrived at t with n choices, and first did not fit at f, starts before

  - every group of m choices that arrives after t + head start (n) - head start (m), so before all groups that arrive
    after t + MAX_HEAD_START_S, if it fits when its turn comes;
  - every group after it in order that needs the same capacity, from f + PATIENCE_S on, even if it does not fit.

Groups of a higher priority always start first and can starve groups of a lower priority. This is intended.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

PER_CHOICE_S = 0.5
"""Delay in seconds of a waiting group for each choice. From `bench.router`, as are the next two (docs/log.md)."""
MAX_HEAD_START_S = 10.0
"""Maximum delay of a group in seconds: the patience of a client does not grow with n."""
PATIENCE_S = 1.0
"""Seconds for which groups that fit can overtake a group that does not fit."""


@dataclass(order=True, slots=True)
class _Waiting(Generic[Item]):
    priority: int
    tag_s: float
    number: int
    item: Item = field(compare=False)
    lane: str = field(compare=False)
    arrival_s: float = field(compare=False)
    passed_over_s: float | None = field(default=None, compare=False)
    """Time at which the item first did not fit. None before."""


class FairQueue(Generic[Item]):
    """A queue of hashable items, each at most once."""

    def __init__(
        self,
        *,
        max_wait_s: float,
        per_choice_s: float = PER_CHOICE_S,
        max_head_start_s: float = MAX_HEAD_START_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._max_wait_s = max_wait_s
        self._per_choice_s = per_choice_s
        self._max_head_start_s = max_head_start_s
        self._patience_s = patience_s
        self._order: list[_Waiting[Item]] = []
        self._by_item: dict[Item, _Waiting[Item]] = {}
        """Entries by item, in order of arrival."""
        self._lanes = Counter[str]()
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def lanes(self) -> Collection[str]:
        return self._lanes.keys()

    def push(self, item: Item, *, choices: int, priority: int, now_s: float, lane: str = "") -> None:
        """`now_s` never decreases."""
        if item in self._by_item:
            raise ValueError(f"{item} is already in the queue")
        tag_s = now_s + min(choices * self._per_choice_s, self._max_head_start_s)
        waiting = _Waiting(priority, tag_s, self._pushed, item, lane, now_s)
        self._pushed += 1
        self._by_item[item] = waiting
        self._lanes[lane] += 1
        insort(self._order, waiting)

    def pop(
        self,
        fits: Callable[[Item], bool],
        now_s: float,
        *,
        share_capacity: Callable[[str, str], bool] = lambda *_: True,
    ) -> Item | None:
        """Removes and returns the next item that may start, if any. `share_capacity`: returns True if two lanes need
        the same capacity."""
        blocked: set[str] = set()
        """Lanes whose capacity is reserved for an item that was overtaken for `patience_s`."""
        for waiting in self._order:
            if waiting.lane in blocked:
                continue
            if fits(waiting.item):
                self.remove(waiting.item)
                return waiting.item
            if waiting.passed_over_s is None:
                waiting.passed_over_s = now_s
            if now_s >= waiting.passed_over_s + self._patience_s:
                lanes = (lane for lane in self._lanes if lane == waiting.lane or share_capacity(waiting.lane, lane))
                blocked.update(lanes)
                if len(blocked) == len(self._lanes):
                    return None
        return None

    def remove(self, item: Item) -> None:
        """Removes an item, for example because its client has left. Ignores an item that is not in the queue."""
        waiting = self._by_item.pop(item, None)
        if waiting is not None:
            del self._order[bisect_left(self._order, waiting)]
            self._lanes[waiting.lane] -= 1
            if not self._lanes[waiting.lane]:
                del self._lanes[waiting.lane]

    def expired(self, now_s: float) -> list[Item]:
        """Removes and returns the items that have waited for `max_wait_s`, the longest wait first."""
        late = []
        for item, waiting in self._by_item.items():
            if now_s < waiting.arrival_s + self._max_wait_s:
                break
            late.append(item)
        for item in late:
            self.remove(item)
        return late
