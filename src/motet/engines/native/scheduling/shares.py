"""Divides an engine between clients: knows what each client holds, has used, and is entitled to.

    KV blocks     A client is entitled to weight / (sum of the weights of all clients with groups) of the blocks. It may
                  use more while others do not need it (max-min fairness, as in dominant resource fairness; Ghodsi et
                  al., 2011).
    compute       The work of a step goes first to the client that has used the least for its weight (virtual token
                  counters; Sheng et al., "Fairness in Serving Large Language Models", 2024). A client that returns
                  starts with the lowest counter of the present clients, so idle time gives no credit.

Who runs when changes no token of any answer. A client that is alone gets everything, as if there were no shares.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from motet.engines.native.scheduling.queues import AgeOrdered, TurnKey, turn_key
from motet.engines.native.scheduling.step_cost import prompt_cost
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.transfer.lease import Lease

_AGE = attrgetter("age")
SAME_COST = 32.0
"""Prompts whose costs differ by less go in order of arrival: about a hundred tokens."""
PRESENCE_S = 2.0
"""Seconds after its last group for which a client still counts as present: steps stay short for its next request."""


@dataclass(eq=False)
class ClientUse:
    """The resources that one client uses."""

    weight: float
    used: float = 0.0
    """Cost of the work for this client (`step_cost`), divided by its weight. A client that comes back starts with the
    lowest value of the present clients, if its own is lower."""
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
    """The last group for which blocks were missing, and the pool's `num_gains` then. While `num_gains` is the same, the
    group cannot fit."""
    last_ran: tuple[int, int, int] | None = None
    """Age of the sequence that ran last, in a step without rows for all of them."""
    left_s: float = 0.0
    """Time at which its last group ended."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that its running groups hold, each block once."""
        return self.num_tail_blocks + len(self.trunk_blocks)

    @property
    def hold(self) -> float:
        """Number of blocks that it holds for its weight."""
        return self.num_blocks / self.weight


class Shares:
    """The clients of an engine. Owned by the scheduler."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._num_blocks = num_blocks
        self._clock = clock
        self._uses: dict[str, ClientUse] = {}
        self.several_seen = False
        """True once the engine has had groups of several clients."""
        self._total_weight = 0.0
        """Sum of the weights of all clients with groups."""
        self._num_clients = 0
        """Number of clients with groups."""

    def of(self, group: Group) -> ClientUse:
        """Returns the use of the client of a group that was added."""
        return self._uses[group.request.client]

    def __iter__(self) -> Iterator[ClientUse]:
        return iter(self._uses.values())

    def add(self, group: Group) -> None:
        """Counts a new group, and gives it its turn among the client's prompts: short prompts before long ones that
        arrived shortly before them."""
        request = group.request
        use = self._uses.setdefault(request.client, ClientUse(request.share))
        self.several_seen |= len(self._uses) > 1
        if not use.num_groups:
            use.weight = request.share
            use.used = max(use.used, min((other.used for other in self if other.num_groups), default=0.0))
            self._total_weight += use.weight
            self._num_clients += 1
        use.num_groups += 1
        cost = prompt_cost(0, group.trunk.num_tokens)
        group.trunk.turn = use.used * use.weight + cost - cost % SAME_COST

    def remove(self, group: Group) -> None:
        """Counts the end of a group, which holds no blocks any more."""
        use = self.of(group)
        use.num_groups -= 1
        if not use.num_groups:
            self._total_weight -= use.weight
            self._num_clients -= 1
            use.left_s, use.refused = self._clock(), None

    def is_contended(self) -> bool:
        """Returns True if several clients are present. Forgets clients that are not."""
        if self.several_seen:
            since_s = self._clock() - PRESENCE_S
            for name in [name for name, use in self._uses.items() if not use.num_groups and use.left_s < since_s]:
                del self._uses[name]
        return len(self._uses) > 1

    def part(self, use: ClientUse) -> float:
        """Returns the part of everything to which a client with groups is entitled: 1 if no other client has groups."""
        return 1.0 if self._num_clients == 1 else use.weight / self._total_weight

    def entitled(self, use: ClientUse) -> int:
        """Returns the number of blocks to which a client with groups is entitled."""
        return int(self.part(use) * self._num_blocks)

    def in_turn(self, sequences: Iterable[ChoiceSequence]) -> list[ChoiceSequence]:
        """Returns running sequences, which are in order of age, in the order in which they get rows: the most urgent
        first, then in ascending order of what their clients have used; of one client, from the sequence after the
        last one that ran."""
        by_key: dict[TurnKey, list[ChoiceSequence]] = {}
        for sequence in sequences:
            by_key.setdefault(turn_key(sequence.group), []).append(sequence)
        ordered = []
        for _, _, key in sorted((key[0], self._uses[key[1]].used, key) for key in by_key):
            own, last_ran = by_key[key], self._uses[key[1]].last_ran
            first = 0 if last_ran is None else bisect_right(own, last_ran, key=_AGE)
            ordered += own[first:] + own[:first]
        return ordered

    def lease_to_end(self, leases: Iterable[Lease], *, spare: str) -> Lease | None:
        """Returns the oldest lease of the client that is furthest above its share, with its leases and its groups; None
        if no client except `spare` is above it. A client without groups counts as one that has some."""
        held, oldest = Counter[str](), dict[str, Lease]()
        for lease in leases:
            held[lease.client] += len(lease.ticket.remote_block_ids)
            known = oldest.setdefault(lease.client, lease)
            if lease.granted_s < known.granted_s:
                oldest[lease.client] = lease
        above: dict[str, float] = {}
        for client, lease in oldest.items():
            use = self._uses.get(client)
            has_groups = use is not None and use.num_groups > 0
            total = self._total_weight if has_groups else self._total_weight + lease.share
            blocks = held[client] + (use.num_blocks if use is not None else 0)
            above[client] = blocks / lease.share - self._num_blocks / total
        client = max((one for one in above if one != spare), key=above.__getitem__, default="")
        return oldest[client] if above.get(client, 0) > 0 and client != spare else None

    def charge(self, group: Group, cost: float) -> None:
        use = self._uses[group.request.client]
        use.used += cost / use.weight

    def check(self) -> None:
        """Raises AssertionError if a client without groups uses something."""
        for name, use in self._uses.items():
            if not use.num_groups and (use.num_blocks or use.num_sequences or len(use.preempted)):
                raise AssertionError(f"client {name!r} has no groups, but {use}")
        total = sum(use.weight for use in self if use.num_groups)
        if abs(total - self._total_weight) > 1e-6 * max(1.0, total):
            raise AssertionError(f"the weights are {total} in total, {self._total_weight} are counted")
