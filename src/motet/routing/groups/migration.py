"""The limits on moves of a part from worker to worker. Pure.

error                                       what happens to the choices that were on the worker
RequestError, EngineError, EngineClosed     they end: the error would recur, or this server is closing
EngineDied, EngineSilent, WorkerLeaving     they continue on another worker, at most `limit` times
NoWorker                                    they wait for a worker with the weights with which they were started, at
                                            most `wait_s`
Overloaded                                  another worker is tried. After `MAX_REFUSALS` refusals the group fails with
                                            the refusal if its client has received nothing; otherwise it waits
"""

from collections.abc import Callable
from enum import StrEnum

from motet.errors import (
    EngineDiedError,
    EngineSilentError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    WorkerLeavingError,
)
from motet.metrics.routing import RoutingFigures
from motet.routing.groups.unfinished import Unfinished

MAX_REFUSALS = 8
"""Number of refusals by workers after which a group fails with the refusal if its client has received nothing."""
RETRY_S = 0.25
"""Seconds from a refusal to the next attempt, unless the fleet changes earlier. The first refusal has no pause."""


class Cause(StrEnum):
    """The reason why a group had to move. A label of the metric."""

    DIED = "died"
    SILENT = "silent"
    LEAVING = "leaving"
    REFUSED = "refused"
    NO_WORKER = "no-worker"


class MoveOutcome(StrEnum):
    """How a move ended. A label of the metric."""

    RESUMED = "resumed"
    LIMIT = "limit"
    REFUSED = "refused"
    NO_WORKER = "no-worker"
    FAILED = "failed"
    """The group ended with an error that would recur."""
    CLOSED = "closed"
    """The group's reader left before the move had ended, or the server closed."""


def cause_of(error: MotetError) -> Cause | None:
    """Returns None if a group ends with this error."""
    match error:
        case NoWorkerError():
            return Cause.NO_WORKER
        case EngineSilentError():
            return Cause.SILENT
        case EngineDiedError():
            return Cause.DIED
        case WorkerLeavingError():
            return Cause.LEAVING
        case OverloadedError():
            return Cause.REFUSED
        case _:
            return None


class Moves:
    """Counts and limits the moves of one part. All errors up to the next delta belong to one move."""

    def __init__(self, figures: RoutingFigures, *, limit: int, wait_s: float, clock: Callable[[], float]) -> None:
        """`limit`: maximum number of moves; with 0, the part ends with its worker. `wait_s`: maximum time
        without a worker."""
        self._limit = limit
        self._wait_s = wait_s
        self._figures = figures
        self._clock = clock
        self._cause: Cause | None = None
        """The cause of the current move. None while the part is on a worker."""
        self._moved = 0
        self._refusals = 0
        self._without_worker_until_s: float | None = None

    def start(self, cause: Cause, *, started: bool) -> bool:
        """Returns False if the part may not move any more. `started`: True if its reader has received a delta."""
        self._cause = self._cause or cause
        if cause is Cause.REFUSED:
            self._refusals += 1
            if not started and self._refusals >= MAX_REFUSALS:
                self.end(MoveOutcome.REFUSED)
        elif cause is not Cause.NO_WORKER:
            self._moved += 1
            self._without_worker_until_s = None
            if self._moved > self._limit:
                self.end(MoveOutcome.LIMIT)
        return self._cause is not None

    def patience_s(self, cause: Cause, *, worker_expected: bool) -> float | None:
        """Returns the seconds to wait before the next attempt, unless the fleet changes earlier. Returns None if the
        wait has been too long, or is useless because no worker is expected."""
        if cause not in (Cause.NO_WORKER, Cause.REFUSED) or (cause is Cause.REFUSED and self._refusals == 1):
            return 0.0
        now_s = self._clock()
        if self._without_worker_until_s is None:
            self._without_worker_until_s = now_s + self._wait_s
        left_s = self._without_worker_until_s - now_s
        if left_s <= 0 or not worker_expected:
            self.end(MoveOutcome.NO_WORKER if cause is Cause.NO_WORKER else MoveOutcome.REFUSED)
            return None
        return left_s if cause is Cause.NO_WORKER else min(left_s, RETRY_S)

    def resumed(self, unfinished: Unfinished) -> None:
        """Called for the first delta after a move, before its tokens are added to `unfinished`."""
        if self._cause is not None:
            self._figures.choices_resumed += len(unfinished)
            self._figures.tokens_replayed += unfinished.output_tokens
            self.end(MoveOutcome.RESUMED)

    def end(self, outcome: MoveOutcome) -> None:
        """Ends the current move, if any."""
        if self._cause is not None:
            self._figures.migrations[self._cause.value, outcome.value] += 1
        self._cause, self._without_worker_until_s = None, None
        self._refusals = 0
