"""On which worker a session was last: its next prompt begins with what that worker has read and written."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

SESSION_TTL_S = 600.0
"""A session that was silent for so long has lost its KV, as a rule."""
MAX_SESSIONS = 100_000


@dataclass(frozen=True, slots=True)
class _Stay:
    worker: str
    until_s: float


class Affinity:
    """Sessions by id, the one that was silent longest first; it is forgotten first when there are too many."""

    def __init__(
        self, *, clock: Callable[[], float], ttl_s: float = SESSION_TTL_S, max_sessions: int = MAX_SESSIONS
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._stays: OrderedDict[str, _Stay] = OrderedDict()

    def __len__(self) -> int:
        self._forget_old()
        return len(self._stays)

    def worker_of(self, session: str) -> str | None:
        """None: the session is new, or was silent for too long, or its worker has left."""
        self._forget_old()
        stay = self._stays.get(session)
        return None if stay is None else stay.worker

    def keep(self, session: str, worker: str) -> None:
        """A group of the session was given to the worker."""
        self._stays[session] = _Stay(worker, self._clock() + self._ttl_s)
        self._stays.move_to_end(session)
        self._forget_old()
        if len(self._stays) > self._max_sessions:
            self._stays.popitem(last=False)

    def forget_worker(self, worker: str) -> None:
        """It has left, or lost its KV. Looks at every session (milliseconds for 100,000), which is rare enough."""
        for session in [session for session, stay in self._stays.items() if stay.worker == worker]:
            del self._stays[session]

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._stays and next(iter(self._stays.values())).until_s <= now_s:
            self._stays.popitem(last=False)
