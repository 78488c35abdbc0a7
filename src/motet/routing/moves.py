"""Why and how often a group may move from worker to worker, and what is counted of it. Pure but for the clock."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from motet.errors import (
    EngineDiedError,
    EngineSilentError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    WorkerLeavingError,
)
from motet.routing.unfinished import Unfinished

REFUSALS = 8
"""Workers that may refuse a group that has shown nothing before it is refused itself."""
ASK_AGAIN_S = 0.25
"""After its first refusal another worker is asked at once; after the next ones so soon, if nothing changes before."""


class Cause(StrEnum):
    """Why a group had to move; a label of the metric."""

    DIED = "died"
    SILENT = "silent"
    LEAVING = "leaving"
    REFUSED = "refused"
    NO_WORKER = "no-worker"


class Outcome(StrEnum):
    """What became of a move; a label of the metric."""

    RESUMED = "resumed"
    LIMIT = "limit"
    """The group had moved too often."""
    REFUSED = "refused"
    NO_WORKER = "no-worker"
    """None came in time."""
    FAILED = "failed"
    """It ended with an error that would come again."""
    CLOSED = "closed"
    """The group's reader left first, or the server closed."""


@dataclass(frozen=True)
class MigrationRules:
    """How far a group is followed."""

    limit: int = 3
    """Moves of one group. 0: it ends with its worker."""
    wait_s: float = 15.0
    """How long a group without a worker waits for one."""


class MigrationFigures:
    """Counts over all groups."""

    def __init__(self) -> None:
        self._moves = Counter[tuple[str, str]]()
        self.choices_resumed = 0
        self.tokens_replayed = 0

    @property
    def moves(self) -> Mapping[tuple[str, str], int]:
        """By (cause, outcome); those that have occurred."""
        return dict(self._moves)

    def ended(self, cause: Cause, outcome: Outcome) -> None:
        self._moves[cause.value, outcome.value] += 1

    def resumed(self, left: Unfinished) -> None:
        self.choices_resumed += left.choices
        self.tokens_replayed += left.tokens


def cause_of(error: MotetError) -> Cause | None:
    """None: the group ends with this error."""
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
    """Those of one group. From an error to the first delta after it, all that goes wrong is one move."""

    def __init__(self, rules: MigrationRules, figures: MigrationFigures, *, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._figures = figures
        self._clock = clock
        self._cause: Cause | None = None
        """Of the present move; None: the group is where it was."""
        self._moved = 0
        self._refusals = 0
        self._without_worker_until_s: float | None = None

    def begin(self, cause: Cause, error: MotetError, *, begun: bool) -> None:
        """Raises `error` where the group may move no more. `begun`: its reader has been given something."""
        self._cause = self._cause or cause
        if cause is Cause.REFUSED:
            self._refusals += 1
            if not begun and self._refusals >= REFUSALS:
                self.end(Outcome.REFUSED)
                raise error
        elif cause is not Cause.NO_WORKER:
            self._moved += 1
            self._without_worker_until_s = None
            if self._moved > self._rules.limit:
                self.end(Outcome.LIMIT)
                raise error

    def patience_s(self, cause: Cause, *, hopeful: bool) -> float | None:
        """How long to wait before it is tried again, if nothing changes; None: it has been too long, or, not being
        `hopeful`, would be in vain."""
        if cause not in (Cause.NO_WORKER, Cause.REFUSED) or (cause is Cause.REFUSED and self._refusals == 1):
            return 0.0
        now = self._clock()
        if self._without_worker_until_s is None:
            self._without_worker_until_s = now + self._rules.wait_s
        left_s = self._without_worker_until_s - now
        if left_s <= 0 or not hopeful:
            self.end(Outcome.NO_WORKER if cause is Cause.NO_WORKER else Outcome.REFUSED)
            return None
        return left_s if cause is Cause.NO_WORKER else min(left_s, ASK_AGAIN_S)

    def resumed(self, left: Unfinished) -> None:
        """The first delta after a move is there; `left` does not have it yet."""
        if self._cause is not None:
            self._figures.resumed(left)
        self.end(Outcome.RESUMED)

    def end(self, outcome: Outcome) -> None:
        """Of the present move, if there is one."""
        if self._cause is not None:
            self._figures.ended(self._cause, outcome)
        self._cause, self._without_worker_until_s = None, None
        self._refusals = 0
