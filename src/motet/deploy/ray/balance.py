"""Chooses the decode replica for a request in Serve's proxy: by session, and by load in choices. Needs no Ray.

    load = unfinished requests that this proxy sent to the replica + all other choices in the replica's last report

Serve's proxy chooses before it has received the body, so neither n nor the prompt is known: a request counts as one
choice until the replica's next report includes it."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

import msgspec

from motet.routing.workers.affinity import SESSION_TTL_S, Affinity
from motet.session_ids import SessionHeaders

SESSION_SLACK = 8
"""Maximum number of choices that a session's replica can have more than the least busy one. Eight open choices cost as
much as computing 600 tokens of a prompt."""
DELIVERY_S = 5.0
"""Maximum time for a request to reach its replica and for a report to come back, on a machine with too few cores."""


class LoadReport(msgspec.Struct, frozen=True):
    """The load of a replica, in the routing statistics that Serve passes to its routers."""

    number: int
    """Number of this report, counted by the replica."""
    open_choices: int


@dataclass(frozen=True)
class _SentRequest:
    last_report: int
    """Number of the replica's last report when the request was sent."""
    sent_s: float


class _Replica:
    """One replica, as one router knows it."""

    def __init__(self) -> None:
        self._last_report = 0
        self._other_choices = 0
        self._sent: dict[str, _SentRequest] = {}
        """Unfinished requests of this router, by id."""

    @property
    def load(self) -> int:
        return len(self._sent) + self._other_choices

    def send(self, request: str, *, now_s: float) -> None:
        self._sent[request] = _SentRequest(self._last_report, now_s)

    def finish(self, request: str) -> None:
        self._sent.pop(request, None)

    def update(self, report: LoadReport, now_s: float) -> list[str]:
        """Applies a report. Returns the requests that, according to the report, must have ended."""
        if report.number == self._last_report:
            return []
        self._last_report = report.number
        # The oldest requests in excess of the report's choices have ended unnoticed, or never arrived. Requests that
        # were sent shortly before the report was made are not counted: it may not include them.
        settled = [
            request
            for request, sent in self._sent.items()
            if report.number >= sent.last_report + 2 and now_s - sent.sent_s >= DELIVERY_S
        ]
        ended = settled[: max(0, len(settled) - report.open_choices)]
        for request in ended:
            self.finish(request)
        self._other_choices = max(0, report.open_choices - len(self._sent))
        return ended


class ReplicaBalance:
    """The replicas and unfinished requests of one router: numbers in, replica ids out."""

    def __init__(self, *, session_ttl_s: float = SESSION_TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._replica_of: dict[str, str] = {}
        """Replica ids by request, for all unfinished requests."""
        self._sessions = Affinity(clock=clock, ttl_s=session_ttl_s)
        self._turns = count()

    def ranked(self, session: str, reports: Mapping[str, LoadReport | None]) -> list[str]:
        """Returns all replicas, the best one first. `session`: empty if there is none; `reports`: the last report of
        each replica, None if it has no readable one."""
        for id in self._replicas.keys() - reports.keys():
            self._remove(id)
        for id, report in reports.items():
            replica = self._replicas.setdefault(id, _Replica())
            for request in replica.update(report, self._clock()) if report is not None else ():
                del self._replica_of[request]
        loads = {id: self._replicas[id].load for id in reports}
        home = self._sessions.worker_of(session)
        if home is not None and home in loads and loads[home] - min(loads.values()) <= SESSION_SLACK:
            loads[home] = -1
        # The order of equal replicas differs between requests, but is the same for one session in all routers.
        salt = session or str(next(self._turns))
        return sorted(loads, key=lambda id: (loads[id], _digest(f"{salt} {id}")))

    def send(self, request: str, replica: str, *, session: str) -> None:
        """Counts a request at this replica, and not at an earlier one any more."""
        self.finish(request)
        self._replica_of[request] = replica
        self._replicas.setdefault(replica, _Replica()).send(request, now_s=self._clock())
        self._sessions.record(session, replica)

    def replica_of(self, request: str) -> str | None:
        return self._replica_of.get(request)

    def finish(self, request: str) -> None:
        """Stops counting a request. Ignores unknown requests."""
        if (replica := self._replicas.get(self._replica_of.pop(request, ""))) is not None:
            replica.finish(request)

    def _remove(self, id: str) -> None:
        del self._replicas[id]
        self._replica_of = {request: replica for request, replica in self._replica_of.items() if replica != id}


def _digest(text: str) -> bytes:
    """Returns a hash that is the same in all processes. The order of two hashes does not depend on how the texts
    differ, as it would with a linear hash such as a CRC."""
    return blake2b(text.encode(), digest_size=8).digest()


def report_in(stats: object) -> LoadReport | None:
    """Reads a report from Serve's routing statistics. Returns None if they have another form or are still missing."""
    try:
        return msgspec.convert(stats, LoadReport)
    except msgspec.ValidationError:
        return None


def session_in(arguments: Iterable[object], headers: SessionHeaders) -> str:
    """Reads the session from the arguments of a call to a replica, such as the client's HTTP request. Returns
    an empty text if Serve passes it in another form."""
    for argument in arguments:
        scope = getattr(argument, "asgi_scope", None)
        if isinstance(scope, Mapping) and isinstance(sent := scope.get("headers"), Iterable):
            return headers.session_of(sent)
    return ""
