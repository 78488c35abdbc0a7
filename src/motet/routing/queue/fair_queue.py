"""Orders groups that wait for capacity: clients take turns, small groups can overtake, and no group starves. Pure: time
is an argument.

    order      priority (lower first), then what the client holds relative to its weight (less first), then
               tag = arrival + head start (n), then arrival
               head start (n) = the smaller of n x PER_CHOICE_S and MAX_HEAD_START_S, which other groups have over a
               group of n choices
    capacity   the first group in order that may start starts:
               - it fits, or it has not fitted for PATIENCE_S and fits in parts; but see "reserved"
               - it is within its client's share (`ClientRules.in_share`), whatever other clients hold or wait for
    reserved   after a group has not fitted for PATIENCE_S, no later group of its client and none of a lower priority
               starts before it, and later groups of other clients do so only within their share
    lanes      items of one lane need the same capacity, which `share_capacity` extends to pairs of lanes. Groups that
               need other capacity are not affected by a reservation

Between clients this is max-min fairness: the next one to start is the one that holds the least (Ghodsi et al.,
"Dominant resource fairness", 2011; `workers.client_share`). Among the groups of a client it is fair queueing (Demers,
Keshav, Shenker, 1989) with the arrival time instead of virtual time. Both give simple bounds. Among equal priorities, a
group of n choices that arrived at t, and first did not fit at f, starts

  - before every group of m choices of its client that arrives after t + head start (n) - head start (m), so before all
    that arrive after t + MAX_HEAD_START_S, if it may start when its turn comes;
  - before every group of its client after it in order that needs the same capacity, from f + PATIENCE_S on;
  - before every group of another client after it in order that needs the same capacity and would exceed that client's
    share, from f + PATIENCE_S on;
  - at the next `pop` when it is the first of its client and within its client's share. Other clients affect only the
    size of the share, by their number and weights, and not by what they send or hold.

So a group whose blocks are within its client's share starts at the latest when its client's groups before it have
started and the client has no open choices on one of the workers. A larger group starts when the blocks are free: other
clients can keep them only within their shares. Groups of a higher priority always start first and can starve groups of
a lower priority. This is intended.
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
"""Delay in seconds of a waiting group for each choice. From `bench.router`, as are the next two (docs/log.md)."""
MAX_HEAD_START_S = 10.0
"""Maximum delay of a group in seconds: the patience of a client does not grow with n."""
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
    """Time at which the item first did not fit. None before."""


@dataclass(frozen=True)
class ClientRules(Generic[Item]):
    """Functions that tell the queue about clients. The defaults are right for a single client."""

    held: Callable[[str, float], float] = lambda *_: 0.0
    """Takes a client and its weight, and returns what it holds relative to the weight."""
    in_share: Callable[[Item], bool] = lambda _: False
    """Returns True if the client stays within its share when the item starts."""
    in_parts: Callable[[Item], bool] = lambda _: False
    """Returns True if the item can start in parts: at least one of its choices fits."""


ONE_CLIENT: ClientRules[Any] = ClientRules()


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
        self._lines: dict[tuple[int, str], list[_Waiting[Item]]] = {}
        """Entries by priority and client, in the order of tags."""
        self._by_item: dict[Item, _Waiting[Item]] = {}
        """Entries by item, in order of arrival."""
        self._weights: dict[str, dict[str, float]] = {}
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
        """The weights of the clients that have items, by lane and client. Changes with the queue."""
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
        tag_s = now_s + min(choices * self._per_choice_s, self._max_head_start_s)
        waiting = _Waiting(tag_s, self._pushed, item, client, priority, lane, now_s)
        self._pushed += 1
        self._by_item[item] = waiting
        self._counts[lane, client] += 1
        self._weights.setdefault(lane, {})[client] = weight
        insort(self._lines.setdefault((priority, client), []), waiting)

    def pop(
        self,
        fits: Callable[[Item], bool],
        now_s: float,
        *,
        clients: ClientRules[Item] = ONE_CLIENT,
        share_capacity: Callable[[str, str], bool] = lambda *_: True,
    ) -> Item | None:
        """Removes and returns the next item that may start, if any. `share_capacity`: returns True if two lanes need
        the same capacity."""
        reserved: dict[str, int] = {}
        """Lanes whose capacity is reserved, with the priority of the first item for which it is."""
        closed: set[tuple[str, str]] = set()
        """Lanes and clients whose capacity is reserved for an earlier item of the client."""
        for waiting in self._in_order(clients.held):
            lane, item = waiting.lane, waiting.item
            if (lane, waiting.client) in closed or waiting.priority > reserved.get(lane, waiting.priority):
                continue
            impatient = self._is_impatient(waiting, now_s)
            fits_now = lane not in reserved and (fits(item) or (impatient and clients.in_parts(item)))
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
        line = self._lines[waiting.priority, waiting.client]
        del line[bisect_left(line, waiting)]
        if not line:
            del self._lines[waiting.priority, waiting.client]
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

        def rank(line: tuple[int, str]) -> tuple[int, float]:
            priority, client = line
            return priority, holdings[client]

        for _, equal in groupby(sorted(self._lines, key=rank), key=rank):
            yield from merge(*(self._lines[line] for line in equal))

    def _is_impatient(self, waiting: _Waiting[Item], now_s: float) -> bool:
        return waiting.passed_over_s is not None and now_s >= waiting.passed_over_s + self._patience_s
