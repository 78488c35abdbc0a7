"""Which decode replica gets a request that Serve's proxy brings: by session, and by load in choices. Without Ray.

load = what this router has routed there and is not over + what others have there, as the replica last told
"""

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from motet.deploy.ray.asked import Asked

SESSION_TTL_S = 600.0
MAX_SESSIONS = 100_000
SESSION_SLACK = 8
"""By how many choices the replica of a session may be busier than the least: what computing 600 prompt tokens again
costs, by the weights of `motet.routing.cost`."""
ON_THE_WAY_S = 5.0
"""So long a request may take to its replica, and a record from there to here, where processes wait for a core."""
RECORD, OPEN_CHOICES = "record", "open_choices"


@dataclass(frozen=True)
class Record:
    """What a replica told of itself."""

    number: int
    """Grows with each."""
    open_choices: int

    def stats(self) -> dict[str, int]:
        """As Serve passes it on."""
        return {RECORD: self.number, OPEN_CHOICES: self.open_choices}


@dataclass(frozen=True)
class _Booking:
    choices: int
    known: int
    """Number of the replica's record when this was routed."""
    since_s: float


class _Replica:
    """One replica, as one router knows it."""

    def __init__(self) -> None:
        self._known = 0
        self._others = 0
        self._bookings: dict[str, _Booking] = {}
        self._own = 0
        """Choices of the bookings."""

    @property
    def load(self) -> int:
        return self._own + self._others

    def book(self, request: str, choices: int, now_s: float) -> None:
        self._bookings[request] = _Booking(choices, self._known, now_s)
        self._own += choices

    def drop(self, request: str) -> None:
        booking = self._bookings.pop(request, None)
        self._own -= 0 if booking is None else booking.choices

    def hear(self, record: Record, now_s: float) -> list[str]:
        """Returns the requests that are over, as it turns out."""
        if record.number == self._known:
            return []
        self._known = record.number
        lost = self._lost(record, now_s)
        for id in lost:
            self.drop(id)
        self._others = max(0, record.open_choices - self._own)
        return lost

    def _lost(self, record: Record, now_s: float) -> list[str]:
        """Records that come soon after a request was routed may have been made before it arrived; later ones have it.
        More than they say cannot be open: whose end nobody told, or who never came, is lost, the oldest first."""
        settled = [
            id
            for id, booking in self._bookings.items()
            if record.number >= booking.known + 2 and now_s - booking.since_s >= ON_THE_WAY_S
        ]
        surplus = sum(self._bookings[id].choices for id in settled) - record.open_choices
        lost = []
        for id in settled:
            if surplus <= 0:
                break
            surplus -= self._bookings[id].choices
            lost.append(id)
        return lost


class Balance:
    """The deciding part: numbers in, replica ids out. One for each router."""

    def __init__(self, *, session_ttl_s: float = SESSION_TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._session_ttl_s = session_ttl_s
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._where: dict[str, str] = {}
        """Replica of each request that is booked."""
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Replica and end of each, the one that was silent longest first."""
        self._turns = count()

    def ranked(self, asked: Asked, told: Mapping[str, Record | None]) -> list[str]:
        """All replicas that are there, the one to take first. `told`: the last record of each; None: it has none that
        can be read."""
        for id in self._replicas.keys() - told.keys():
            self._forget(id)
        for id, record in told.items():
            replica = self._replicas.setdefault(id, _Replica())
            for request in replica.hear(record, self._clock()) if record is not None else ():
                del self._where[request]
        loads = {id: self._replicas[id].load for id in told}
        stay = self._session_replica(asked.session)
        if stay in loads and loads[stay] - min(loads.values()) <= SESSION_SLACK:
            loads[stay] = -1
        # Equal ones in an order that differs from request to request, and that all routers have for one session.
        salt = asked.session or str(next(self._turns))
        return sorted(loads, key=lambda id: (loads[id], zlib.crc32(f"{salt} {id}".encode())))

    def book(self, request: str, replica: str, asked: Asked) -> None:
        """The request goes there; if it was to go elsewhere, not any more."""
        self.done(request)
        self._where[request] = replica
        self._replicas.setdefault(replica, _Replica()).book(request, asked.choices, self._clock())
        if asked.session:
            self._sessions[asked.session] = (replica, self._clock() + self._session_ttl_s)
            self._sessions.move_to_end(asked.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def replica_of(self, request: str) -> str | None:
        return self._where.get(request)

    def done(self, request: str) -> None:
        """It is over. Unknown ones are ignored."""
        replica = self._replicas.get(self._where.pop(request, ""))
        if replica is not None:
            replica.drop(request)

    def _session_replica(self, session: str) -> str:
        while self._sessions and next(iter(self._sessions.values()))[1] <= self._clock():
            self._sessions.popitem(last=False)
        return self._sessions.get(session, ("", 0.0))[0]

    def _forget(self, id: str) -> None:
        del self._replicas[id]
        self._where = {request: replica for request, replica in self._where.items() if replica != id}


def record_of(stats: object) -> Record | None:
    """None: they have another shape, such as none yet."""
    if not isinstance(stats, Mapping):
        return None
    number, open_choices = stats.get(RECORD), stats.get(OPEN_CHOICES)
    if not isinstance(number, int) or not isinstance(open_choices, int):
        return None
    return Record(number, max(0, open_choices))
