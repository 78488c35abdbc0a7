"""Leases, on both sides. A lease keeps the blocks of a trunk until its readers have fetched them. Pure: the caller
passes the time.

    prefill worker (`LeaseTable`)                     decode worker (`Heartbeats`)

1   grants a lease, and returns a ticket that names it
2                                                     a group holds the ticket: heartbeats are due
3   extends the lease at each heartbeat
4                                                     the group's pull starts (and sends heartbeats itself), or
                                                      the group releases the ticket
5   ends the lease: all its readers are done, it was released, or no heartbeat came for `LeaseTable.seconds`
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from motet.transfer.proof import GENERATION_BITS, Proof
from motet.transfer.ticket import Ticket, TransferAddress

HEARTBEATS_PER_LEASE = 3
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 60.0
"""Bounds of the interval between two heartbeats, in seconds, whatever a ticket contains."""


def new_lease_id() -> int:
    return secrets.randbits(GENERATION_BITS - 1) + 1


@dataclass
class Lease:
    """Keeps a ticket's blocks until all readers are done, or none has sent a heartbeat for `LeaseTable.seconds`."""

    ticket: Ticket
    granted_s: float
    expires_s: float
    client: str = ""
    """The client for which the blocks were prefilled (`GenerateRequest.client`)."""
    client_weight: float = 1.0
    done_readers: set[str] = field(default_factory=set)


class LeaseTable:
    """The leases of a prefill worker. A lease that `grant` returns is held; a lease that another method returns has
    ended, and the caller must free its blocks."""

    def __init__(self, proof: Proof, *, seconds: float) -> None:
        self.seconds = seconds
        self._proof = proof
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        """Leases by id, in the order of their last heartbeats, which is the order in which they expire."""
        self._lease_ids: dict[str, int] = {}
        """Id of the latest lease of each request."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def grant(self, ticket: Ticket, *, now_s: float, client: str = "", client_weight: float = 1.0) -> Lease:
        """Makes the lease that a ticket names. It holds the blocks from now on; the proof has its digest."""
        self._proof.publish(ticket.lease_slot, ticket.digest)
        lease = Lease(ticket, now_s, now_s + self.seconds, client, client_weight)
        self._leases[ticket.lease_id] = lease
        self._lease_ids[ticket.remote_request_id] = ticket.lease_id
        return lease

    def reader_done(self, lease_id: int, reader: str) -> Lease | None:
        """Ends the lease if this was its last reader. A repeated or a late message of a reader changes nothing."""
        if (lease := self._leases.get(lease_id)) is None:
            return None
        lease.done_readers.add(reader)
        return self._remove(lease) if len(lease.done_readers) >= lease.ticket.readers else None

    def extend(self, lease_id: int, now_s: float) -> None:
        if lease := self._leases.get(lease_id):
            lease.expires_s = now_s + self.seconds
            self._leases.move_to_end(lease_id)

    def release(self, lease_id: int) -> Lease | None:
        """Ends a lease at once, even if a reader is still reading."""
        lease = self._leases.get(lease_id)
        return None if lease is None else self._remove(lease)

    def release_all(self) -> list[Lease]:
        return [self._remove(lease) for lease in list(self._leases.values())]

    def release_request(self, request_id: str) -> Lease | None:
        """Ends the latest lease that was granted for a request."""
        lease_id = self._lease_ids.get(request_id)
        return None if lease_id is None else self.release(lease_id)

    def expire(self, now_s: float) -> list[Lease]:
        """Ends the leases whose time is over."""
        expired = []
        while (expiry_s := self.next_expiry_s()) is not None and expiry_s <= now_s:
            expired.append(self._remove(next(iter(self._leases.values()))))
        return expired

    def next_expiry_s(self) -> float | None:
        """Returns the time at which the next lease can expire; None without leases."""
        return next((lease.expires_s for lease in self._leases.values()), None)

    def oldest_age_s(self, now_s: float) -> float | None:
        """Returns the age of the oldest lease in seconds; None without leases."""
        return max((now_s - lease.granted_s for lease in self._leases.values()), default=None)

    def tables(self) -> list[tuple[int, ...]]:
        """Returns the blocks of every lease, which the block pool counts as held."""
        return [lease.ticket.remote_block_ids for lease in self._leases.values()]

    def check(self) -> None:
        """Raises AssertionError unless this table is consistent, in itself and with the proof."""
        self._proof.check({lease.ticket.lease_slot: lease.ticket.digest for lease in self._leases.values()})
        if any(len(lease.done_readers) >= lease.ticket.readers for lease in self._leases.values()):
            raise AssertionError("a lease is held although all its readers are done")
        expiries = [lease.expires_s for lease in self._leases.values()]
        if expiries != sorted(expiries):
            raise AssertionError("leases are not in the order in which they expire")
        tickets = {request_id: self._leases[lease_id].ticket for request_id, lease_id in self._lease_ids.items()}
        if any(ticket.remote_request_id != request_id for request_id, ticket in tickets.items()):
            raise AssertionError("a request has the lease of another request")

    def _remove(self, lease: Lease) -> Lease:
        ticket = lease.ticket
        del self._leases[ticket.lease_id]
        if self._lease_ids.get(ticket.remote_request_id) == ticket.lease_id:
            del self._lease_ids[ticket.remote_request_id]
        self._proof.free_slot(ticket.lease_slot)
        return lease


@dataclass
class _LeaseHeartbeat:
    ticket: Ticket
    every_s: float
    next_s: float
    holders: int = 0
    """Number of groups that hold the ticket."""


class Heartbeats:
    """Schedules the heartbeats for the leases of other workers, by the address of the worker and the id of the lease,
    while groups of this worker hold their tickets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heartbeats: dict[tuple[TransferAddress, int], _LeaseHeartbeat] = {}

    @property
    def next_s(self) -> float | None:
        """Time at which `due` next returns a ticket; None while no ticket is held."""
        return min((heartbeat.next_s for heartbeat in self._heartbeats.values()), default=None)

    def hold(self, ticket: Ticket) -> None:
        """Adds a holder of a ticket. The first heartbeat is due at once, since the ticket can be old."""
        every_s = max(MIN_INTERVAL_S, min(ticket.lease_s / HEARTBEATS_PER_LEASE, MAX_INTERVAL_S))
        new = _LeaseHeartbeat(ticket, every_s, self._clock())
        self._heartbeats.setdefault((ticket.address, ticket.lease_id), new).holders += 1

    def release(self, ticket: Ticket) -> None:
        """Removes a holder of a ticket; changes nothing for a ticket that has no holder."""
        if heartbeat := self._heartbeats.get((ticket.address, ticket.lease_id)):
            heartbeat.holders -= 1
            if not heartbeat.holders:
                del self._heartbeats[ticket.address, ticket.lease_id]

    def due(self) -> list[Ticket]:
        """Returns the ticket of each lease whose heartbeat is due now, and schedules its next heartbeat."""
        now_s = self._clock()
        due = [heartbeat for heartbeat in self._heartbeats.values() if heartbeat.next_s <= now_s]
        for heartbeat in due:
            heartbeat.next_s = now_s + heartbeat.every_s
        return [heartbeat.ticket for heartbeat in due]

    def release_all(self) -> list[Ticket]:
        """Removes all holders. Returns the ticket of each lease, once for each of its holders."""
        held = [heartbeat.ticket for heartbeat in self._heartbeats.values() for _ in range(heartbeat.holders)]
        self._heartbeats.clear()
        return held
