"""Leases, on both sides. Pure: the clock comes from outside.

prefill worker  `LeaseTable`: the blocks that are kept for readers, and until when
decode worker   `Heartbeats`: the leases of other workers that need a sign of life from us, because a group here has
                their ticket and has not pulled yet
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from motet.transfer.proof import GENERATION_BITS, Proof
from motet.transfer.ticket import Ticket, TransferAddress

BEATS_PER_LEASE = 3
SHORTEST_S, LONGEST_S = 0.1, 60.0
"""Bounds of the seconds between two heartbeats, whatever a ticket says."""


def new_lease_id() -> int:
    return secrets.randbits(GENERATION_BITS - 1) + 1


@dataclass
class Lease:
    """Keeps a ticket's blocks until all readers are done, or none has given a sign of life in `LeaseTable.seconds`."""

    ticket: Ticket
    granted_s: float
    ends_s: float
    done: set[str] = field(default_factory=set)


class LeaseTable:
    """Leases by id. If a method returns a lease, its caller must release the lease's blocks."""

    def __init__(self, proof: Proof, *, seconds: float) -> None:
        self.seconds = seconds
        self._proof = proof
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        """In the order in which they end: all last equally long after their last sign of life."""
        self._of_request: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, ticket: Ticket, *, now_s: float) -> Lease:
        """Makes the lease that a ticket names. It holds the blocks from now on, and its slot shows the digest."""
        self._proof.show(ticket.lease_slot, ticket.digest)
        lease = Lease(ticket, now_s, now_s + self.seconds)
        self._leases[ticket.lease_id] = lease
        self._of_request[ticket.remote_request_id] = ticket.lease_id
        return lease

    def reader_done(self, lease_id: int, reader: str) -> Lease | None:
        """Returns the lease if that was its last reader. A second or a late message of a reader changes nothing."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        lease.done.add(reader)
        return self._remove(lease) if len(lease.done) >= lease.ticket.readers else None

    def reader_waits(self, lease_id: int, now_s: float) -> None:
        """Extends a lease: one of its readers has given a sign of life."""
        if lease := self._leases.get(lease_id):
            lease.ends_s = now_s + self.seconds
            self._leases.move_to_end(lease_id)

    def end(self, lease_id: int) -> Lease | None:
        """Ends a lease at once, also if somebody still reads."""
        lease = self._leases.get(lease_id)
        return None if lease is None else self._remove(lease)

    def end_all(self) -> list[Lease]:
        """Ends every lease at once."""
        return [self._remove(lease) for lease in list(self._leases.values())]

    def end_of_request(self, request_id: str) -> Lease | None:
        """Ends the latest lease that was granted for a request."""
        lease_id = self._of_request.get(request_id)
        return None if lease_id is None else self.end(lease_id)

    def expired(self, now_s: float) -> list[Lease]:
        """Takes out the leases whose time is up."""
        expired = []
        while (end_s := self.next_end_s()) is not None and end_s <= now_s:
            expired.append(self._remove(next(iter(self._leases.values()))))
        return expired

    def next_end_s(self) -> float | None:
        """Time at which the next lease may expire; None without leases."""
        return next((lease.ends_s for lease in self._leases.values()), None)

    def oldest_s(self, now_s: float) -> float | None:
        """Age of the oldest lease in seconds."""
        return max((now_s - lease.granted_s for lease in self._leases.values()), default=None)

    def tables(self) -> list[tuple[int, ...]]:
        """Returns the blocks of every lease, which the pool's books must account for."""
        return [lease.ticket.remote_block_ids for lease in self._leases.values()]

    def check(self) -> None:
        """Raises AssertionError unless these books and the proof agree."""
        self._proof.check({lease.ticket.lease_slot: lease.ticket.digest for lease in self._leases.values()})
        if any(len(lease.done) >= lease.ticket.readers for lease in self._leases.values()):
            raise AssertionError("a lease that is over is still held")
        ends = [lease.ends_s for lease in self._leases.values()]
        if ends != sorted(ends):
            raise AssertionError("leases are not in the order in which they end")
        told = {request_id: self._leases[lease_id].ticket for request_id, lease_id in self._of_request.items()}
        if any(ticket.remote_request_id != request_id for request_id, ticket in told.items()):
            raise AssertionError("a request has the lease of another one")

    def _remove(self, lease: Lease) -> Lease:
        ticket = lease.ticket
        del self._leases[ticket.lease_id]
        if self._of_request.get(ticket.remote_request_id) == ticket.lease_id:
            del self._of_request[ticket.remote_request_id]
        self._proof.hide(ticket.lease_slot)
        return lease


@dataclass
class _Beat:
    ticket: Ticket
    every_s: float
    next_s: float
    holders: int = 0
    """Number of groups that hold the ticket."""


class Heartbeats:
    """Knows when each lease of another worker needs a sign of life. Its worker's address and its id name a lease."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._beats: dict[tuple[TransferAddress, int], _Beat] = {}

    @property
    def next_s(self) -> float | None:
        """Time of the clock at which `due` next returns something; None while no ticket is held."""
        return min((beat.next_s for beat in self._beats.values()), default=None)

    def begin(self, ticket: Ticket) -> None:
        """Counts one more holder of a ticket. The first beat is due at once, since the ticket may be old."""
        every_s = max(SHORTEST_S, min(ticket.lease_s / BEATS_PER_LEASE, LONGEST_S))
        new = _Beat(ticket, every_s, self._clock())
        self._beats.setdefault((ticket.address, ticket.lease_id), new).holders += 1

    def end(self, ticket: Ticket) -> None:
        """Counts one holder less; changes nothing for a ticket that nobody holds."""
        if beat := self._beats.get((ticket.address, ticket.lease_id)):
            beat.holders -= 1
            if not beat.holders:
                del self._beats[ticket.address, ticket.lease_id]

    def due(self) -> list[Ticket]:
        """Returns a ticket of each lease that needs a sign of life now, and sets their next beats."""
        now_s = self._clock()
        due = [beat for beat in self._beats.values() if beat.next_s <= now_s]
        for beat in due:
            beat.next_s = now_s + beat.every_s
        return [beat.ticket for beat in due]

    def end_all(self) -> list[Ticket]:
        """Forgets every ticket; returns one of each lease, once for each holder."""
        held = [beat.ticket for beat in self._beats.values() for _ in range(beat.holders)]
        self._beats.clear()
        return held
