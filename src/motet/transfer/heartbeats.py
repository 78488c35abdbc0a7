"""Which leases of others are kept alive because a group here holds their ticket and has not pulled yet. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from motet.transfer.ticket import Ticket, TransferAddress

BEATS_A_LEASE = 3
SHORTEST_S, LONGEST_S = 0.1, 60.0
"""Bounds of the time between two beats, whatever a ticket says."""


@dataclass(frozen=True)
class LeaseOf:
    """A lease of another worker."""

    address: TransferAddress
    lease_id: int


@dataclass
class _Beat:
    every_s: float
    next_s: float
    holders: int = 0
    """Groups that hold the ticket."""


class Heartbeats:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._beats: dict[LeaseOf, _Beat] = {}

    @property
    def next_s(self) -> float | None:
        """When `due` has something next, by the clock."""
        return min((beat.next_s for beat in self._beats.values()), default=None)

    def begin(self, ticket: Ticket) -> None:
        """The first beat is due at once: the ticket may have been under way for long."""
        every_s = max(SHORTEST_S, min(ticket.lease_s / BEATS_A_LEASE, LONGEST_S))
        beat = self._beats.setdefault(lease_of(ticket), _Beat(every_s, self._clock()))
        beat.holders += 1

    def end(self, ticket: Ticket) -> None:
        """One holder less; of a ticket that never began too."""
        lease = lease_of(ticket)
        if beat := self._beats.get(lease):
            beat.holders -= 1
            if not beat.holders:
                del self._beats[lease]

    def due(self) -> list[LeaseOf]:
        """Leases that must hear of us now."""
        now_s = self._clock()
        due = [lease for lease, beat in self._beats.items() if beat.next_s <= now_s]
        for lease in due:
            self._beats[lease].next_s = now_s + self._beats[lease].every_s
        return due

    def end_all(self) -> list[LeaseOf]:
        """One entry a holder."""
        held = [lease for lease, beat in self._beats.items() for _ in range(beat.holders)]
        self._beats.clear()
        return held


def lease_of(ticket: Ticket) -> LeaseOf:
    return LeaseOf(ticket.address, ticket.lease_id)
