"""The clients of an engine: what each client holds and has used, and the share to which it is entitled.

    share         weight of the client / sum of the weights of all clients with groups in this engine. The router's
                  share of a worker (`routing.workers.worker_share`) also counts clients whose groups wait in the router
    KV blocks     A client is entitled to its share of the blocks. It can use more while others do not need them:
                  max-min fairness, as in dominant resource fairness (Ghodsi et al., 2011)
    compute       The client with the lowest work counter is served first: virtual token counters (Sheng et al.,
                  "Fairness in Serving Large Language Models", 2024). The virtual time is the lowest counter of the
                  clients that wait for work. The counters of all other clients are raised to it, so that neither idle
                  time nor a small load gives credit

Shares change the order of work, and no token of any answer. A client that is alone gets the entire engine.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from motet.engines.native.scheduling.queues import AgeOrdered, QueueKey, queue_key
from motet.engines.native.scheduling.step_cost import prompt_cost
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.transfer.lease import Lease

_AGE = attrgetter("age")
SAME_COST = 32.0
"""Costs of prompts are rounded down to multiples of this cost of about a hundred tokens, so that prompts of similar
length are computed in order of arrival."""
MAX_FOLLOW_RATIO = 2.0
"""Maximum time for which a group follows a group of another client, relative to the time for computing its prompt in
the share of its own client."""
PRESENCE_S = 2.0
"""Time in seconds for which a client counts as present after the end of its last group, so that steps are still short
when its next request arrives."""


@dataclass(eq=False)
class ClientUse:
    """The resources that one client uses."""

    weight: float
    work_counter: float = 0.0
    """Cost of the work for this client (`step_cost`), divided by its weight. It is raised to the virtual time when a
    client without groups gets one, and close to it after each step that contains all of the client's work."""
    num_groups: int = 0
    """Number of its groups, running and waiting."""
    num_sequences: int = 0
    """Number of sequences of its running groups, including preempted ones."""
    num_tail_blocks: int = 0
    trunk_blocks: Counter[int] = field(default_factory=Counter)
    """Number of its running groups that hold each block of a trunk."""
    preempted: AgeOrdered[ChoiceSequence] = field(default_factory=AgeOrdered)
    """Sequences of its running groups that wait for their tail blocks."""
    refused: tuple[Group, int] | None = None
    """The last group for which there were too few blocks, and `BlockPool.num_gains` at that time. The group cannot fit
    while `num_gains` is the same."""
    last_ran: tuple[int, int, int] | None = None
    """Age of the last of its sequences that got a row while sequences took turns."""
    following: list[tuple[float, tuple[int, int], Group]] = field(default_factory=list)
    """A heap of its groups that have followed groups of other clients. Its key is the work counter at which a group
    stops following."""
    in_background: bool = False
    """True if its groups are lines of batches, which run after all others."""
    left_s: float = 0.0
    """Time at which its last group ended."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that its running groups hold, each block once."""
        return self.num_tail_blocks + len(self.trunk_blocks)

    @property
    def weighted_blocks(self) -> float:
        """Number of blocks that its running groups hold, divided by its weight."""
        return self.num_blocks / self.weight


class EngineClients:
    """The clients that are present in an engine. Owned by the scheduler."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._num_blocks = num_blocks
        self._clock = clock
        self._uses: dict[str, ClientUse] = {}
        self.several_seen = False
        """True once the engine has had groups of several clients, or of a batch."""
        self._total_weight = 0.0
        """Sum of the weights of all clients with groups."""
        self._num_clients = 0
        """Number of clients with groups."""
        self._virtual_time = 0.0
        """The lowest work counter of the clients that wait for work, which never decreases."""

    def use_of(self, group: Group) -> ClientUse:
        """Returns what the client of a group uses. The group has been added."""
        return self._uses[group.request.client]

    def __iter__(self) -> Iterator[ClientUse]:
        return iter(self._uses.values())

    def add(self, group: Group) -> None:
        """Counts a new group, and sets its finish tag: the cost of the client's work, including this prompt, if the
        prompt were computed next. So short prompts come before long prompts that arrived shortly before them."""
        request = group.request
        use = self._uses.setdefault(request.client, ClientUse(request.client_weight, in_background=group.in_background))
        self.several_seen |= len(self._uses) > 1 or group.in_background
        if not use.num_groups:
            use.weight = request.client_weight
            lowest = min((other.work_counter for other in self if other.num_groups), default=self._virtual_time)
            self._virtual_time = max(self._virtual_time, lowest)
            use.work_counter = max(use.work_counter, lowest)
            self._total_weight += use.weight
            self._num_clients += 1
        use.num_groups += 1
        cost = prompt_cost(0, group.trunk.num_tokens)
        group.trunk.finish_tag = use.work_counter * use.weight + cost - cost % SAME_COST

    def remove(self, group: Group) -> None:
        """Counts the end of a group, which holds no blocks any more."""
        use = self.use_of(group)
        use.num_groups -= 1
        if not use.num_groups:
            self._total_weight -= use.weight
            self._num_clients -= 1
            use.left_s, use.refused = self._clock(), None
            use.following.clear()
            if not self._num_clients:
                self._virtual_time = max(self._virtual_time, use.work_counter)

    def is_contended(self) -> bool:
        """Returns True if several clients are present, or a batch: steps must be short when another client arrives.
        Forgets clients that are not present any more."""
        if not self.several_seen:
            return False
        since_s = self._clock() - PRESENCE_S
        for name in [name for name, use in self._uses.items() if not use.num_groups and use.left_s < since_s]:
            del self._uses[name]
        return len(self._uses) > 1 or self.have_background

    @property
    def several_in_foreground(self) -> bool:
        """True if several clients other than batches are present."""
        return sum(not use.in_background for use in self) > 1

    @property
    def have_background(self) -> bool:
        """True if a batch is present."""
        return self.several_seen and any(use.in_background for use in self)

    def share(self, use: ClientUse) -> float:
        """Returns the fraction of the engine to which a client with groups is entitled: 1 if only it has groups."""
        return 1.0 if self._num_clients == 1 else use.weight / self._total_weight

    def entitled_blocks(self, use: ClientUse) -> int:
        """Returns the number of blocks to which a client with groups is entitled."""
        return int(self.share(use) * self._num_blocks)

    def within_share(self, use: ClientUse, *, more_blocks: int = 0) -> bool:
        """Returns True if a client with groups is entitled to its blocks and to this number of further blocks."""
        return use.num_blocks + more_blocks <= self.entitled_blocks(use)

    def row_order(self, sequences: Iterable[ChoiceSequence]) -> list[ChoiceSequence]:
        """Returns running sequences in the order in which they get rows: the most urgent first, then sequences of the
        clients with the lowest work counters. The sequences of one client follow each other in order of age, starting
        after the sequence that ran last. `sequences`: in order of age."""
        by_key: dict[QueueKey, list[ChoiceSequence]] = {}
        for sequence in sequences:
            by_key.setdefault(queue_key(sequence.group), []).append(sequence)
        ordered = []
        for _, _, key in sorted((key[0], self._uses[key[1]].work_counter, key) for key in by_key):
            own, last_ran = by_key[key], self._uses[key[1]].last_ran
            first = 0 if last_ran is None else bisect_right(own, last_ran, key=_AGE)
            ordered += own[first:] + own[:first]
        return ordered

    def lease_to_release(self, leases: Iterable[Lease], *, exempt: str) -> Lease | None:
        """Returns the oldest lease of the client whose leases and groups exceed its share of the blocks by the largest
        number for its weight; None if no client except `exempt` exceeds its share. The share of a client without groups
        is computed as if it had groups."""
        held, oldest = Counter[str](), dict[str, Lease]()
        for lease in leases:
            held[lease.client] += len(lease.ticket.remote_block_ids)
            known = oldest.setdefault(lease.client, lease)
            if lease.granted_s < known.granted_s:
                oldest[lease.client] = lease
        above: dict[str, float] = {}
        for client, lease in oldest.items():
            if client != exempt:
                use = self._uses.get(client)
                has_groups = use is not None and use.num_groups > 0
                total = self._total_weight if has_groups else self._total_weight + lease.client_weight
                blocks = held[client] + (use.num_blocks if use is not None else 0)
                above[client] = blocks / lease.client_weight - self._num_blocks / total
        most = max(above, key=above.__getitem__, default="")
        return oldest[most] if above.get(most, 0.0) > 0 else None

    def advance(self, waiting: Collection[QueueKey], *, blocked: Mapping[str, float], credit: float) -> None:
        """Advances the virtual time after a step has been planned. `waiting`: priorities and clients with work that the
        step had no time or row for; `blocked`: clients with a group that does not fit, and its cost. The virtual time
        becomes the lowest counter of the waiting clients with the most urgent work, or the highest counter of all
        clients if none waits.

        The counters of other clients follow. If all of a client's work is in the step, its counter lags by at most
        `credit`, plus the cost of a group that does not fit, so that this group keeps its position in the order.
        Without this limit, the client's next groups could take all time from other clients. The counter of a waiting
        client with less urgent work advances by as much as the virtual time."""
        most_urgent = min((priority for priority, _ in waiting), default=0)
        late = {client for _, client in waiting}
        first = {client for priority, client in waiting if priority == most_urgent}
        present = {client: use for client, use in self._uses.items() if use.num_groups}
        counters = {client: use.work_counter for client, use in present.items()}
        found = min(counters[client] for client in first) if first else max(counters.values(), default=0.0)
        passed = max(0.0, found - self._virtual_time)
        self._virtual_time += passed
        for client, use in present.items():
            if client not in late:
                lag = (credit + blocked.get(client, 0.0)) / use.weight
                use.work_counter = max(use.work_counter, self._virtual_time - lag)
            elif client not in first:
                use.work_counter += passed

    def follow(self, group: Group, cost: float) -> None:
        """Called when a group follows a group of another client. `cost`: the cost of its prompt without that group."""
        use = self.use_of(group)
        heappush(use.following, (use.work_counter + MAX_FOLLOW_RATIO * cost / use.weight, group.age, group))

    def delayed_followers(self) -> list[Group]:
        """Returns the groups that have followed a group of another client for too long, because that client computes
        other prompts first."""
        delayed = []
        for use in self:
            while use.following and use.following[0][0] < use.work_counter:
                group = heappop(use.following)[2]
                if group.followed is not None:
                    delayed.append(group)
        return delayed

    def charge(self, group: Group, cost: float) -> None:
        use = self._uses[group.request.client]
        use.work_counter += cost / use.weight

    def check(self) -> None:
        """Raises AssertionError if a client without groups uses resources, or the sum of the weights is wrong."""
        for name, use in self._uses.items():
            if not use.num_groups and (use.num_blocks or use.num_sequences or len(use.preempted)):
                raise AssertionError(f"client {name!r} has no groups, but {use}")
        total = sum(use.weight for use in self if use.num_groups)
        if abs(total - self._total_weight) > 1e-6 * max(1.0, total):
            raise AssertionError(f"the weights are {total} in total, {self._total_weight} are counted")
