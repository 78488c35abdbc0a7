"""Orders groups that wait for room: small ones may overtake, and no large one starves. Pure: time is an argument.

    order    priority (lower first), then tag = arrival + head start (n), then arrival
             head start (n) = the lesser of n x PER_CHOICE_S and MOST_S: what others have over a group of n choices
    room     the first in order that fits goes. A group that did not fit may be overtaken for PATIENCE_S more;
             after that no group behind it goes that wants the same room, until there is enough room for it
    lanes    items of one lane want the same room; `pop` asks about two lanes

It is fair queueing (Demers, Keshav, Shenker, 1989) with arrival in place of virtual time, which gives plain bounds.
Among equal priorities, a group that came at t with n choices, and did not fit for the first time at f, goes before

  - every group of m choices that comes after t + head start (n) - head start (m), so before all that come after
    t + MOST_S, if it fits when its turn comes;
  - every group behind it in order that wants the same room, from f + PATIENCE_S on, whether it fits or not.

A higher priority always goes first, so it can starve lower ones: that is its meaning.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

PER_CHOICE_S = 0.5
"""Seconds by which each choice puts its group later in the queue. From `bench.router`, like the next two
(docs/log.md)."""
MOST_S = 10.0
"""The most seconds by which a group is put later: a client's patience does not grow with n."""
PATIENCE_S = 1.0
"""Seconds for which groups that fit may overtake one that does not."""


@dataclass(order=True, slots=True)
class _Waiting(Generic[Item]):
    priority: int
    tag_s: float
    number: int
    item: Item = field(compare=False)
    lane: str = field(compare=False)
    arrival_s: float = field(compare=False)
    passed_over_s: float | None = field(default=None, compare=False)
    """Time at which it did not fit for the first time."""


class FairQueue(Generic[Item]):
    """Items are hashable and each is in the queue once."""

    def __init__(
        self,
        *,
        max_wait_s: float,
        per_choice_s: float = PER_CHOICE_S,
        most_s: float = MOST_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._max_wait_s = max_wait_s
        self._per_choice_s = per_choice_s
        self._most_s = most_s
        self._patience_s = patience_s
        self._order: list[_Waiting[Item]] = []
        self._by_item: dict[Item, _Waiting[Item]] = {}
        """In order of arrival."""
        self._lanes = Counter[str]()
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def lanes(self) -> Collection[str]:
        """The lanes in which an item waits."""
        return self._lanes.keys()

    def push(self, item: Item, *, choices: int, priority: int, now_s: float, lane: str = "") -> None:
        """`now_s` never goes back."""
        if item in self._by_item:
            raise ValueError(f"{item} is in the queue already")
        tag_s = now_s + min(choices * self._per_choice_s, self._most_s)
        waiting = _Waiting(priority, tag_s, self._pushed, item, lane, now_s)
        self._pushed += 1
        self._by_item[item] = waiting
        self._lanes[lane] += 1
        insort(self._order, waiting)

    def pop(
        self, fits: Callable[[Item], bool], now_s: float, *, same_room: Callable[[str, str], bool] = lambda *_: True
    ) -> Item | None:
        """Takes out and returns the next item that may go, if any. `same_room`: tells if two lanes share room."""
        kept: set[str] = set()
        """Lanes from which nothing more goes: room is kept for an item that was overtaken for long enough."""
        for waiting in self._order:
            if waiting.lane in kept:
                continue
            if fits(waiting.item):
                self.remove(waiting.item)
                return waiting.item
            if waiting.passed_over_s is None:
                waiting.passed_over_s = now_s
            if now_s >= waiting.passed_over_s + self._patience_s:
                kept.update(lane for lane in self._lanes if lane == waiting.lane or same_room(waiting.lane, lane))
                if len(kept) == len(self._lanes):
                    return None
        return None

    def remove(self, item: Item) -> None:
        """Takes out an item whose client has left; one that is not there changes nothing."""
        waiting = self._by_item.pop(item, None)
        if waiting is not None:
            del self._order[bisect_left(self._order, waiting)]
            self._lanes[waiting.lane] -= 1
            if not self._lanes[waiting.lane]:
                del self._lanes[waiting.lane]

    def expired(self, now_s: float) -> list[Item]:
        """Takes those that have waited for `max_wait_s` out of the queue, and returns them, the longest wait first."""
        late = []
        for item, waiting in self._by_item.items():
            if now_s < waiting.arrival_s + self._max_wait_s:
                break
            late.append(item)
        for item in late:
            self.remove(item)
        return late
