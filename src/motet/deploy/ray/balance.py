"""Chooses the decode replica for a request from Serve's proxy: by session, and by load in choices. Needs no Ray.

load = open choices that this router has sent there + choices that others have there, by the replica's last record

Serve's proxy decides before the body has come, so it knows only the headers, and neither n nor the prompt. A client may
put n into a header; without it a request counts as one choice.
"""

import pickle  # noqa: TID251  the proxy has pickled the request, in this very process
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from motet.routing.workers.affinity import SESSION_TTL_S, Affinity

CHOICES_HEADER = "x-motet-choices"
SESSION_HEADER = "x-session-id"
LARGEST_REQUEST = 100_000
"""A header with this number or a larger one is a mistake."""
SESSION_SLACK = 8
"""A session's replica may have this many choices more than the least busy one: the cost of computing 600 tokens."""
ON_THE_WAY_S = 5.0
"""Longest time of a request to its replica, and of a record back, on a machine where processes wait for a core."""


@dataclass(frozen=True)
class RequestHeaders:
    """The facts about a request that a proxy knows."""

    session: str = ""
    choices: int = 1


def asked_of(args: Sequence[object], session: str) -> RequestHeaders:
    """Reads the arguments that the proxy passes to a replica; Serve has already found the session."""
    choices = 1
    for name, value in headers_of(args):
        name = name.lower().replace("_", "-")
        if name == CHOICES_HEADER:
            choices = choices_in(value)
        elif name == SESSION_HEADER:
            session = session or value
    return RequestHeaders(session, choices)


def named_in(args: Sequence[object]) -> str | None:
    """Returns the replica that the hook of `--prefix-router` names, empty if it has none; None without the hook."""
    return args[0] if args and isinstance(args[0], str) else None


def choices_in(text: str) -> int:
    """Returns 1 unless the text is a number of choices."""
    if not (text.isascii() and text.isdigit() and len(text) < len(str(LARGEST_REQUEST))):
        return 1
    return max(1, int(text))


def headers_of(args: Sequence[object]) -> Iterable[tuple[str, str]]:
    """Returns the headers of the ASGI scope that the proxy has pickled into the first argument, if it is that."""
    if not args or not isinstance(args[0], bytes):
        return []
    try:
        headers = pickle.loads(args[0]).asgi_scope["headers"]
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    except Exception:  # another version of Serve may pass something else, but requests must still be routed
        return []


class Record(msgspec.Struct, frozen=True):
    """A replica's report of its load, in statistics that Serve passes on."""

    record: int
    """The number of this record, counted by the replica."""
    open_choices: int


@dataclass(frozen=True)
class _Booking:
    choices: int
    known: int
    """The number of the replica's last record when this request was routed."""
    since_s: float


class _Replica:
    """One replica, as one router knows it."""

    def __init__(self) -> None:
        self._known = 0
        self._others = 0
        self._bookings: dict[str, _Booking] = {}
        self._own = 0
        """Number of choices in all bookings."""

    @property
    def load(self) -> int:
        return self._own + self._others

    def book(self, request: str, choices: int, *, now_s: float) -> None:
        self._bookings[request] = _Booking(choices, self._known, now_s)
        self._own += choices

    def drop(self, request: str) -> None:
        booking = self._bookings.pop(request, None)
        self._own -= 0 if booking is None else booking.choices

    def hear(self, record: Record, now_s: float) -> list[str]:
        """Takes a record, and returns the requests that must be over because of it."""
        if record.record == self._known:
            return []
        self._known = record.record
        lost = self._lost(record, now_s)
        for id in lost:
            self.drop(id)
        self._others = max(0, record.open_choices - self._own)
        return lost

    def _lost(self, record: Record, now_s: float) -> list[str]:
        """Returns the oldest requests beyond the number in the record: their end was not reported, or they never came.
        Requests that were routed shortly before the record was made do not count, since it may lack them."""
        settled = [
            id
            for id, booking in self._bookings.items()
            if record.record >= booking.known + 2 and now_s - booking.since_s >= ON_THE_WAY_S
        ]
        surplus = sum(self._bookings[id].choices for id in settled) - record.open_choices
        lost = []
        for id in settled:
            if surplus <= 0:
                break
            surplus -= self._bookings[id].choices
            lost.append(id)
        return lost


class ReplicaBalance:
    """Decides for one router: numbers in, replica ids out."""

    def __init__(self, *, session_ttl_s: float = SESSION_TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._where: dict[str, str] = {}
        """The replica of each request that is booked."""
        self._sessions = Affinity(clock=clock, ttl_s=session_ttl_s)
        self._turns = count()

    def ranked(self, asked: RequestHeaders, told: Mapping[str, Record | None]) -> list[str]:
        """Returns all replicas, the best first. `told`: the last record of each, None if none can be read."""
        for id in self._replicas.keys() - told.keys():
            self._forget(id)
        for id, record in told.items():
            replica = self._replicas.setdefault(id, _Replica())
            for request in replica.hear(record, self._clock()) if record is not None else ():
                del self._where[request]
        loads = {id: self._replicas[id].load for id in told}
        stay = self._sessions.worker_of(asked.session)
        if stay is not None and stay in loads and loads[stay] - min(loads.values()) <= SESSION_SLACK:
            loads[stay] = -1
        # Equal replicas get an order that differs between requests, but is the same for one session on all routers.
        salt = asked.session or str(next(self._turns))
        return sorted(loads, key=lambda id: (loads[id], zlib.crc32(f"{salt} {id}".encode())))

    def book(self, request: str, replica: str, *, asked: RequestHeaders) -> None:
        """Books a request at a replica, and removes an earlier booking elsewhere."""
        self.done(request)
        self._where[request] = replica
        self._replicas.setdefault(replica, _Replica()).book(request, asked.choices, now_s=self._clock())
        self._sessions.keep(asked.session, replica)

    def replica_of(self, request: str) -> str | None:
        return self._where.get(request)

    def done(self, request: str) -> None:
        """Ends the booking of a request. Unknown ones are ignored."""
        replica = self._replicas.get(self._where.pop(request, ""))
        if replica is not None:
            replica.drop(request)

    def _forget(self, id: str) -> None:
        del self._replicas[id]
        self._where = {request: replica for request, replica in self._where.items() if replica != id}


def record_of(stats: object) -> Record | None:
    """Reads a record from Serve's statistics; None if they have another form, for instance before the first record."""
    try:
        return msgspec.convert(stats, Record)
    except msgspec.ValidationError:
        return None
