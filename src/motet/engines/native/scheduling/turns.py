"""The order in which the replays and prompts of a step are computed, and waiting groups are admitted.

The most urgent goes first. Among equally urgent work goes first what would be complete first if each client always got
its share of the work: fair queueing (Demers, Keshav and Shenker, 1989) with the counters of `shares` as virtual time.
So a short prompt does not wait for a long one of another client, and a client with many prompts does not delay others.
Of one client and priority, replays come before prompts, and prompts in order of their turns (`Shares.add`).
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from heapq import heappop, heappush

from motet.engines.native.scheduling.queues import ReadyGroups, TurnKey, turn, turn_key
from motet.engines.native.scheduling.shares import Shares
from motet.engines.native.scheduling.step_cost import prompt_cost
from motet.engines.native.step.sequence import ChoiceSequence, Group

Work = ChoiceSequence | Group


class TurnOrder:
    """The work of one step, each piece once, while its clients are charged for it."""

    def __init__(
        self, shares: Shares, *, replays: Iterable[ChoiceSequence], prompts: Iterable[Group], ready: ReadyGroups
    ) -> None:
        """`prompts`: running groups with incomplete trunks. `ready`: waiting groups, which the caller removes when they
        are admitted."""
        self._shares = shares
        self._ready = ready
        self._blocked: set[str] = set()
        self._running: defaultdict[TurnKey, deque[Work]] = defaultdict(deque)
        for sequence in replays:
            self._running[turn_key(sequence.group)].append(sequence)
        for group in sorted(prompts, key=turn):
            self._running[turn_key(group)].append(group)
        self._heap: list[tuple[int, float, str]] = []
        for key in {*self._running, *ready.keys()}:
            self._push(key)
        self._last: TurnKey | None = None

    def next(self) -> Work | None:
        """Returns the next work; None if there is no more."""
        if self._last is not None:
            self._push(self._last)
            self._last = None
        while self._heap:
            priority, _, client = heappop(self._heap)
            if (work := self._take((priority, client))) is not None:
                self._last = priority, client
                return work
        return None

    def block(self, client: str) -> None:
        """Takes no more waiting groups of a client, because one does not fit."""
        self._blocked.add(client)

    def _push(self, key: TurnKey) -> None:
        if (work := self._first(key)) is not None:
            use = self._shares.of(work.group if isinstance(work, ChoiceSequence) else work)
            heappush(self._heap, (key[0], use.used + _remaining_cost(work) / use.weight, key[1]))

    def _take(self, key: TurnKey) -> Work | None:
        work, running = self._first(key), self._running[key]
        if running and work is running[0]:
            running.popleft()
        return work

    def _first(self, key: TurnKey) -> Work | None:
        running = self._running[key][0] if self._running[key] else None
        ready = None if key[1] in self._blocked else self._ready.first(key)
        if running is None or (ready is not None and isinstance(running, Group) and turn(ready) < turn(running)):
            return ready
        return running


def _remaining_cost(work: Work) -> float:
    if isinstance(work, ChoiceSequence):
        prompt = len(work.group.prompt)
        return prompt_cost(prompt + work.num_computed, prompt + len(work.output_tokens))
    return prompt_cost(work.trunk.num_computed, work.trunk.num_tokens)
