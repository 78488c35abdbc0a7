"""The order in which the replays and prompts of a step are computed, and waiting groups are admitted.

The most urgent work comes first. Equally urgent work is ordered by the time at which it would be complete if each
client always got its share of the engine: fair queueing (Demers, Keshav and Shenker, 1989), with the work counters of
`clients` as virtual time. So a short prompt does not wait for a long prompt of another client, and a client with many
prompts does not delay others.

For one client and priority, replays come before prompts, and prompts are in order of finish tags.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from motet.engines.native.scheduling.clients import EngineClients
from motet.engines.native.scheduling.queues import QueueKey, ReadyGroups, finish_order, queue_key
from motet.engines.native.scheduling.step_cost import prompt_cost
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.types import BACKGROUND_PRIORITY

Work = ChoiceSequence | Group


class WorkOrder:
    """The work of one step. Each item is returned once. The caller charges the client for an item before it requests
    the next one."""

    def __init__(
        self,
        clients: EngineClients,
        *,
        replays: Iterable[ChoiceSequence],
        prompts: Iterable[Group],
        ready: ReadyGroups,
        without_background: bool = False,
    ) -> None:
        """`prompts`: running groups with incomplete trunks. `ready`: waiting groups; the caller removes the groups that
        it admits. `without_background`: True to leave out the work of batches."""
        self._clients = clients
        self._ready = ready
        self.blocked: dict[str, float] = {}
        """Clients whose waiting groups are left out because one does not fit, with the cost of this group."""
        self._running: defaultdict[QueueKey, deque[Work]] = defaultdict(deque)
        """Replays and prompts of running groups, in order."""
        for sequence in replays:
            self._running[queue_key(sequence.group)].append(sequence)
        for group in sorted(prompts, key=finish_order):
            self._running[queue_key(group)].append(group)
        self._heap: list[tuple[int, float, str]] = []
        """Priority, virtual time at which the next item would be complete, client."""
        for key in {*self._running, *ready.keys()}:
            if not (without_background and key[0] == BACKGROUND_PRIORITY):
                self._push(key)
        self._last: QueueKey | None = None
        """Key of the last returned item. It returns to the heap after its client has been charged."""

    def next(self) -> Work | None:
        """Returns the next item; None if there is none."""
        if self._last is not None:
            self._push(self._last)
            self._last = None
        while self._heap:
            priority, _, client = heappop(self._heap)
            if (work := self._take((priority, client))) is not None:
                self._last = priority, client
                return work
        return None

    def block(self, group: Group) -> None:
        """Leaves out all waiting groups of a client, because this group does not fit."""
        client, cost = group.request.client, _remaining_cost(group)
        self.blocked[client] = max(cost, self.blocked.get(client, 0.0))

    def left(self) -> Iterator[QueueKey]:
        """Returns the priorities and clients of the remaining work."""
        last = [self._last] if self._last is not None else []
        keys = {*last, *((priority, client) for priority, _, client in self._heap)}
        return (key for key in keys if self._first(key) is not None)

    def _push(self, key: QueueKey) -> None:
        """Adds the next item of a client and a priority to the heap, if there is one."""
        if (work := self._first(key)) is not None:
            use = self._clients.use_of(work.group if isinstance(work, ChoiceSequence) else work)
            heappush(self._heap, (key[0], use.work_counter + _remaining_cost(work) / use.weight, key[1]))

    def _take(self, key: QueueKey) -> Work | None:
        work, running = self._first(key), self._running[key]
        if running and work is running[0]:
            running.popleft()
        return work

    def _first(self, key: QueueKey) -> Work | None:
        """Returns the next item of a client and a priority."""
        running = self._running[key][0] if self._running[key] else None
        ready = None if key[1] in self.blocked else self._ready.first(key)
        if running is None or (
            ready is not None and isinstance(running, Group) and finish_order(ready) < finish_order(running)
        ):
            return ready
        return running


def _remaining_cost(work: Work) -> float:
    if isinstance(work, ChoiceSequence):
        prompt = len(work.group.prompt)
        return prompt_cost(prompt + work.num_computed, prompt + len(work.output_tokens))
    return prompt_cost(work.trunk.num_computed, work.trunk.num_tokens)
