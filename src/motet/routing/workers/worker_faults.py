"""Decides how long a worker is avoided that refused a group or sent invalid data."""

from collections.abc import Callable

REFUSAL_S = 0.5
"""Seconds for which a worker that refused a group is avoided."""
DISTRUST_S = 2.0
MAX_DISTRUST_S = 60.0
"""A worker that sent invalid data gets no groups for `DISTRUST_S`. If it sends invalid data again within
`MAX_DISTRUST_S` after that, the duration doubles, up to `MAX_DISTRUST_S`."""


class WorkerFaults:
    """Refusals, invalid data and deaths of one worker. A restart of the worker clears only the refusals."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.deaths = 0
        """Number of times that the worker was found dead."""
        self._clock = clock
        self._refused_until_s = clock()
        self._distrust_s = 0.0
        """Duration of the last distrust."""
        self._distrusted_until_s = clock()

    @property
    def refused(self) -> bool:
        """True for `REFUSAL_S` after the worker refused a group: it is chosen only if there is no other worker."""
        return self._clock() < self._refused_until_s

    def record_refusal(self) -> None:
        self._refused_until_s = self._clock() + REFUSAL_S

    def forget_refusal(self) -> None:
        self._refused_until_s = self._clock()

    @property
    def distrusted(self) -> bool:
        """True for some time after the worker sent invalid data: it gets no groups, whatever it reports."""
        return self._clock() < self._distrusted_until_s

    def distrust(self) -> None:
        """Records that the worker sent invalid data."""
        now_s = self._clock()
        again = now_s < self._distrusted_until_s + MAX_DISTRUST_S and self._distrust_s > 0
        self._distrust_s = min(2 * self._distrust_s, MAX_DISTRUST_S) if again else DISTRUST_S
        self._distrusted_until_s = now_s + self._distrust_s
