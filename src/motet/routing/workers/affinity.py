"""Remembers on which worker a session was last: its next prompt begins with text that this worker has in its cache.

A fleet keeps one `Affinity` for each kind of work, and so does each router of Serve's proxies, for replicas.
"""

from collections import OrderedDict
from collections.abc import Callable

SESSION_TTL_S = 600.0
"""After this many seconds of silence a session has usually lost its KV."""
MAX_SESSIONS = 100_000


class Affinity:
    """Sessions by id, the one that was silent longest first; it is forgotten first when there are too many."""

    def __init__(self, *, clock: Callable[[], float], ttl_s: float = SESSION_TTL_S) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._stays: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """The worker of each session, and when the session is forgotten."""

    def worker_of(self, session: str) -> str | None:
        """Returns None if the session is new, was silent for too long, lost its worker, or is empty."""
        self._forget_old()
        return self._stays.get(session, (None, 0.0))[0]

    def keep(self, session: str, worker: str) -> None:
        """Notes that the worker was given a group of the session; an empty session is ignored."""
        if not session:
            return
        self._stays[session] = worker, self._clock() + self._ttl_s
        self._stays.move_to_end(session)
        self._forget_old()
        if len(self._stays) > MAX_SESSIONS:
            self._stays.popitem(last=False)

    def forget_worker(self, worker: str) -> None:
        """Forgets the sessions of a worker that has left or lost its KV. Rare, and takes milliseconds for 100,000."""
        for session in [session for session, (stays_on, _) in self._stays.items() if stays_on == worker]:
            del self._stays[session]

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._stays and next(iter(self._stays.values()))[1] <= now_s:
            self._stays.popitem(last=False)
