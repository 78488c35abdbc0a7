"""Orders groups that wait for capacity: clients take turns, small groups can overtake, and no group starves. Pure: time
is an argument.

    order      priority (lower first), then what the client holds relative to its weight (less first), then
               tag = arrival + delay (n), then arrival
               delay (n) = the smaller of n x PER_CHOICE_S and MAX_DELAY_S: a group of n choices is ranked as if it had
               arrived later by this time
    start      the first group in order that can start:
               - it fits, unless the capacity is reserved
               - it has not fitted for PATIENCE_S, and fits partially, unless the capacity is reserved
               - it is within its client's share (`ClientRules.in_share`), whatever other clients hold or wait for
    reserved   once a group has not fitted for PATIENCE_S, capacity is reserved for it: later groups of its client and
               groups of a lower priority wait until it has started, and later groups of other clients start before it
               only within their shares
    lanes      items of one lane need the same capacity. Lanes can share capacity (`share_capacity`). A
               reservation affects only these lanes

Between clients this is max-min fairness: the client that holds the least starts the next group (Ghodsi et al.,
"Dominant resource fairness", 2011; `workers.worker_share`). Among the groups of a client it is fair queueing (Demers,
Keshav and Shenker, 1989) with the time of arrival instead of virtual time. Both give simple bounds. Among equal
priorities, a group of n choices that arrived at t, and first did not fit at f, starts

  - before every group of m choices of its client that arrives after t + delay (n) - delay (m), if it can start when it
    is the first; so before every group that arrives after t + MAX_DELAY_S;
  - from f + PATIENCE_S on, before all groups after it in order that need the same capacity, except groups of other
    clients within their shares;
  - at the next `pop`, if it is the first group of its client and within the client's share. Other clients affect only
    the size of the share, by their number and weights, and not by what they send or hold.

So a group whose blocks are within its client's share starts at the latest when the client's groups before it have
started and the client has no open choices on one of the workers. A larger group starts when its blocks are free: from
f + PATIENCE_S on, other clients start groups before it only within their shares. Groups of a higher priority always
start first, and can starve groups of a lower priority. This is intended.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

PER_CHOICE_S = 0.5
"""Delay in the order of groups for each choice, in seconds. From `bench.router`, as are the next two values
(docs/log.md)."""
MAX_DELAY_S = 10.0
"""Maximum of this delay in seconds: a client does not wait longer because n is large."""
PATIENCE_S = 1.0
"""Seconds for which groups that fit can overtake a group that does not fit."""


@dataclass(order=True, slots=True)
class _Waiting(Generic[Item]):
    tag_s: float
    number: int
    item: Item = field(compare=False)
    client: str = field(compare=False)
    priority: int = field(compare=False)
    lane: str = field(compare=False)
    arrival_s: float = field(compare=False)
    passed_over_s: float | None = field(default=None, compare=False)
    """Time at which the item first did not fit; None if it has always fitted."""


@dataclass(frozen=True)
class ClientRules(Generic[Item]):
    """Answers the queue's questions about clients. The defaults are for a single client."""

    held: Callable[[str, float], float] = lambda *_: 0.0
    """Takes a client and its weight, and returns what it holds relative to the weight."""
    in_share: Callable[[Item], bool] = lambda _: False
    """Returns True if the client stays within its share when the item starts."""
    fits_partially: Callable[[Item], bool] = lambda _: False
    """Returns True if at least one of the item's choices fits: the others run when running choices end."""


ONE_CLIENT: ClientRules[Any] = ClientRules()


class FairQueue(Generic[Item]):
    """A queue of hashable items, each at most once."""

    def __init__(
        self,
        *,
        max_wait_s: float,
        per_choice_s: float = PER_CHOICE_S,
        max_delay_s: float = MAX_DELAY_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._max_wait_s = max_wait_s
        self._per_choice_s = per_choice_s
        self._max_delay_s = max_delay_s
        self._patience_s = patience_s
        self._queues: dict[tuple[int, str], list[_Waiting[Item]]] = {}
        """Entries by priority and client, in the order of tags."""
        self._by_item: dict[Item, _Waiting[Item]] = {}
        """Entries by item, in order of arrival."""
        self._weights: dict[str, dict[str, float]] = {}
        """Weights of the clients that have items, by lane and client."""
        self._counts = Counter[tuple[str, str]]()
        """Number of items by lane and client."""
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._by_item)

    @property
    def lanes(self) -> Collection[str]:
        return self._weights.keys()

    @property
    def weights(self) -> Mapping[str, Mapping[str, float]]:
        """The weights of the clients that have items, by lane and client: a view that changes with the queue."""
        return self._weights

    def push(
        self,
        item: Item,
        *,
        choices: int,
        priority: int,
        now_s: float,
        lane: str = "",
        client: str = "",
        weight: float = 1.0,
    ) -> None:
        """`now_s` never decreases."""
        if item in self._by_item:
            raise ValueError(f"{item} is already in the queue")
        tag_s = now_s + min(choices * self._per_choice_s, self._max_delay_s)
        waiting = _Waiting(tag_s, self._pushed, item, client, priority, lane, now_s)
        self._pushed += 1
        self._by_item[item] = waiting
        self._counts[lane, client] += 1
        self._weights.setdefault(lane, {})[client] = weight
        insort(self._queues.setdefault((priority, client), []), waiting)

    def pop(
        self,
        fits: Callable[[Item], bool],
        now_s: float,
        *,
        clients: ClientRules[Item] = ONE_CLIENT,
        share_capacity: Callable[[str, str], bool] = lambda *_: True,
    ) -> Item | None:
        """Removes and returns the next item that can start, if any. `fits`: returns True if there is free capacity for
        an item. `share_capacity`: returns True if two lanes need the same capacity."""
        reserved: dict[str, int] = {}
        """Lanes whose capacity is reserved, with the priority of the first item for which it is reserved."""
        closed: set[tuple[str, str]] = set()
        """Lanes and clients whose other items must wait for an earlier item of the client."""
        for waiting in self._in_order(clients.held):
            lane, item = waiting.lane, waiting.item
            if (lane, waiting.client) in closed or waiting.priority > reserved.get(lane, waiting.priority):
                continue
            impatient = self._is_impatient(waiting, now_s)
            fits_now = lane not in reserved and (fits(item) or (impatient and clients.fits_partially(item)))
            if fits_now or clients.in_share(item):
                self.remove(item)
                return item
            if waiting.passed_over_s is None:
                waiting.passed_over_s = now_s
            if self._is_impatient(waiting, now_s):
                for other in self._weights:
                    if other == lane or share_capacity(lane, other):
                        reserved.setdefault(other, waiting.priority)
                        closed.update(self._counts.keys() & {(other, waiting.client)})
                if len(closed) == len(self._counts):
                    return None
        return None

    def remove(self, item: Item) -> None:
        """Removes an item, for example because its client has left. Ignores an item that is not in the queue."""
        waiting = self._by_item.pop(item, None)
        if waiting is None:
            return
        queue = self._queues[waiting.priority, waiting.client]
        del queue[bisect_left(queue, waiting)]
        if not queue:
            del self._queues[waiting.priority, waiting.client]
        lane, client = waiting.lane, waiting.client
        self._counts[lane, client] -= 1
        if not self._counts[lane, client]:
            del self._counts[lane, client], self._weights[lane][client]
            if not self._weights[lane]:
                del self._weights[lane]

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

    def _in_order(self, held: Callable[[str, float], float]) -> Iterator[_Waiting[Item]]:
        """Yields all entries in order. The queue must not be changed before the last one that is needed."""
        weights = {client: weight for lane in self._weights.values() for client, weight in lane.items()}
        holdings = {client: held(client, weight) for client, weight in weights.items()}

        def rank(key: tuple[int, str]) -> tuple[int, float]:
            priority, client = key
            return priority, holdings[client]

        for _, equal in groupby(sorted(self._queues, key=rank), key=rank):
            yield from merge(*(self._queues[key] for key in equal))

    def _is_impatient(self, waiting: _Waiting[Item], now_s: float) -> bool:
        return waiting.passed_over_s is not None and now_s >= waiting.passed_over_s + self._patience_s
