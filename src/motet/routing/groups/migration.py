"""The states of a group and of its parts, and the limits on the moves of a part from worker to worker. Pure.

error                                       what happens to the choices that were on the worker
RequestError, EngineError, EngineClosed     they end: the error would recur, or this server is closing
EngineDied, EngineSilent, WorkerLeaving     they continue on another worker, at most `limit` times
NoWorker                                    they wait at most `wait_s` for a worker that has the weights with which they
                                            were started
Overloaded                                  another worker is tried. After `MAX_REFUSALS` refusals the group fails with
                                            the refusal if its client has received nothing; otherwise it waits
"""

from collections.abc import Callable, Mapping
from enum import Enum, StrEnum, auto

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


class GroupState(Enum):
    """The state of a group, or of a part of it."""

    QUEUED = auto()
    """No worker has the group."""
    PREFILLING = auto()
    """A prefill worker computes the prompt."""
    GENERATING = auto()
    """The choices are on a worker, or each part on a worker of its own."""
    MOVING = auto()
    """The worker was lost, or refused the group. The group waits for another worker."""
    OVER = auto()


GENERATING = GroupState.GENERATING  # for the code that runs for each token: the attribute takes 50 ns in Python 3.11
NEXT: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.QUEUED: frozenset({GroupState.PREFILLING, GENERATING, GroupState.MOVING, GroupState.OVER}),
    GroupState.PREFILLING: frozenset({GENERATING, GroupState.MOVING, GroupState.OVER}),
    GENERATING: frozenset({GroupState.MOVING, GroupState.OVER}),
    GroupState.MOVING: frozenset({GroupState.PREFILLING, GENERATING, GroupState.OVER}),
    GroupState.OVER: frozenset(),
}
"""The allowed transitions. A part whose first worker refuses it changes from QUEUED to MOVING."""


def transition(old: GroupState, new: GroupState) -> GroupState:
    """Returns `new`. Raises AssertionError if the transition is not allowed."""
    if new is not old and new not in NEXT[old]:
        raise AssertionError(f"a group cannot go from {old.name} to {new.name}")
    return new


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


CAUSES: Mapping[type[MotetError], Cause] = {
    NoWorkerError: Cause.NO_WORKER,
    EngineSilentError: Cause.SILENT,
    EngineDiedError: Cause.DIED,
    WorkerLeavingError: Cause.LEAVING,
    OverloadedError: Cause.REFUSED,
}
"""The cause of a move for each error. The first class that matches counts."""


def cause_of(error: MotetError) -> Cause | None:
    """Returns None if a group ends with this error."""
    return next((cause for kind, cause in CAUSES.items() if isinstance(error, kind)), None)


class Moves:
    """Counts and limits the moves of one part. All errors up to the next delta belong to one move."""

    def __init__(self, figures: RoutingFigures, *, limit: int, wait_s: float, clock: Callable[[], float]) -> None:
        """`limit`: maximum number of moves; 0 ends the part with its worker. `wait_s`: maximum wait for a worker."""
        self.wait_s = wait_s
        self._limit = limit
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
        """Returns seconds to wait for a change of the fleet; None after too long a wait, or if no worker can come."""
        if cause not in (Cause.NO_WORKER, Cause.REFUSED) or (cause is Cause.REFUSED and self._refusals == 1):
            return 0.0
        now_s = self._clock()
        if self._without_worker_until_s is None:
            self._without_worker_until_s = now_s + self.wait_s
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
        if self._cause is not None:
            self._figures.migrations[self._cause.value, outcome.value] += 1
        self._cause, self._without_worker_until_s, self._refusals = None, None, 0
