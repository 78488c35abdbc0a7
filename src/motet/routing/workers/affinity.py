"""The last worker of each session: the session's next prompt starts with text that this worker has in its cache. A
fleet has one `Affinity` for each kind of work, and the router of each Ray Serve proxy has one for replicas."""

from collections import OrderedDict
from collections.abc import Callable

SESSION_TTL_S = 600.0
"""Seconds without a request after which a session has usually lost its KV."""
MAX_SESSIONS = 100_000


class Affinity:
    """Sessions by id. Above `MAX_SESSIONS`, the least recently used session is forgotten."""

    def __init__(self, *, clock: Callable[[], float], ttl_s: float = SESSION_TTL_S) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._placements: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """The worker of each session, and the time at which the session is forgotten."""

    def worker_of(self, session: str) -> str | None:
        """Returns None if the session is new, was forgotten, lost its worker, or is empty."""
        self._forget_old()
        return self._placements.get(session, (None, 0.0))[0]

    def record(self, session: str, worker: str) -> None:
        """Records that the worker got a group of the session. Ignores an empty session."""
        if not session:
            return
        self._placements[session] = worker, self._clock() + self._ttl_s
        self._placements.move_to_end(session)
        self._forget_old()
        if len(self._placements) > MAX_SESSIONS:
            self._placements.popitem(last=False)

    def forget_worker(self, worker: str) -> None:
        """Forgets the sessions of a worker that has left or lost its KV. Takes milliseconds for 100,000 sessions."""
        for session in [session for session, (last, _) in self._placements.items() if last == worker]:
            del self._placements[session]

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._placements and next(iter(self._placements.values()))[1] <= now_s:
            self._placements.popitem(last=False)
