"""The limits on moves of a group from worker to worker, and the rest of it that is still to be written. Pure.

    error                                       what happens to the choices that were on the worker
    RequestError, EngineError, EngineClosed     they end: the error would come again, or this server is closing
    EngineDied, EngineSilent, WorkerLeaving     they go on elsewhere, `limit` times at most
    NoWorker                                    they wait for a worker, `wait_s` at most; a worker with other weights
                                                than those that began to write them does not count
    Overloaded                                  another worker is asked. After `REFUSALS` refusals a group whose client
                                                has seen nothing is refused itself; any other waits for a worker

A token depends on logits, seed and position only, so between workers with equal fingerprints the choices write the
tokens that they would have written.
"""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from motet.errors import (
    EngineDiedError,
    EngineSilentError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    WorkerLeavingError,
)
from motet.ids import RequestId
from motet.merge import PromptOnce
from motet.metrics.routing import RoutingFigures
from motet.types import ChoiceDelta, ChoiceStart, Finish, FinishReason, GenerateRequest, GroupDelta

REFUSALS = 8
"""Number of refusals by workers after which a group that has shown nothing is refused itself."""
ASK_AGAIN_S = 0.25
"""Seconds from a refusal to the next attempt, unless something changes before; after the first there is no pause."""


class Cause(StrEnum):
    """Why a group had to move; a label of the metric."""

    DIED = "died"
    SILENT = "silent"
    LEAVING = "leaving"
    REFUSED = "refused"
    NO_WORKER = "no-worker"


class MoveOutcome(StrEnum):
    """How a move ended; a label of the metric."""

    RESUMED = "resumed"
    LIMIT = "limit"
    REFUSED = "refused"
    NO_WORKER = "no-worker"
    FAILED = "failed"
    """The group ended with an error that would come again."""
    CLOSED = "closed"
    """The group's reader left first, or the server closed."""


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
        """`limit`: most moves of the group; with 0 it ends with its worker. `wait_s`: longest time without a worker."""
        self._limit = limit
        self._wait_s = wait_s
        self._figures = figures
        self._clock = clock
        self._cause: Cause | None = None
        """The cause of the present move; None while the group is on a worker."""
        self._moved = 0
        self._refusals = 0
        self._without_worker_until_s: float | None = None

    def begin(self, cause: Cause, *, begun: bool) -> bool:
        """Returns False if the group may not move any more. `begun`: its reader has been given something."""
        self._cause = self._cause or cause
        if cause is Cause.REFUSED:
            self._refusals += 1
            if not begun and self._refusals >= REFUSALS:
                self.end(MoveOutcome.REFUSED)
        elif cause is not Cause.NO_WORKER:
            self._moved += 1
            self._without_worker_until_s = None
            if self._moved > self._limit:
                self.end(MoveOutcome.LIMIT)
        return self._cause is not None

    def patience_s(self, cause: Cause, *, hopeful: bool) -> float | None:
        """Returns the seconds to wait before the next attempt, unless something changes before. Returns None if the
        wait has been too long, or is useless because no worker is expected (`hopeful` is False)."""
        if cause not in (Cause.NO_WORKER, Cause.REFUSED) or (cause is Cause.REFUSED and self._refusals == 1):
            return 0.0
        now = self._clock()
        if self._without_worker_until_s is None:
            self._without_worker_until_s = now + self._wait_s
        left_s = self._without_worker_until_s - now
        if left_s <= 0 or not hopeful:
            self.end(MoveOutcome.NO_WORKER if cause is Cause.NO_WORKER else MoveOutcome.REFUSED)
            return None
        return left_s if cause is Cause.NO_WORKER else min(left_s, ASK_AGAIN_S)

    def resumed(self, unfinished: "Unfinished") -> None:
        """Notes that the first delta after a move has come; `unfinished` does not have it yet."""
        if self._cause is not None:
            self._figures.choices_resumed += len(unfinished)
            self._figures.tokens_replayed += unfinished.output_tokens
            self.end(MoveOutcome.RESUMED)

    def end(self, outcome: MoveOutcome) -> None:
        """Ends the present move, if there is one."""
        if self._cause is not None:
            self._figures.migrations[self._cause.value, outcome.value] += 1
        self._cause, self._without_worker_until_s = None, None
        self._refusals = 0


class OpenChoice:
    """A choice that has not finished."""

    __slots__ = ("output", "room", "seed", "tail_blocks")

    def __init__(self, seed: int, output: list[int]) -> None:
        self.seed = seed
        self.output = output
        self.tail_blocks = 0
        """KV blocks that we assume its present worker holds for it, beside the prompt's."""
        self.room = 0
        """Number of output tokens up to which no other block is needed."""

    def placed(self, block_size: int) -> None:
        """Counts its blocks, each of `block_size` tokens. A choice holds one before it has written anything."""
        self.tail_blocks = len(self.output) // block_size + 1
        self.room = self.tail_blocks * block_size - 1


class Unfinished:
    """The choices that are still to be written, by index; a move makes a new group of them."""

    def __init__(self, request: GenerateRequest, *, prompt: PromptOnce | None = None) -> None:
        """`prompt`: shared by all parts of a group."""
        self._request = request
        self.model = request.model
        self.choices = {start.index: OpenChoice(start.seed, list(start.output_tokens)) for start in request.choices}
        self.begun = False
        """True once the reader has been given something."""
        self.prompt = prompt or PromptOnce()
        """The report on the prompt, which the reader of the group gets once."""
        self.model_digest = request.model_digest
        """Digest of the model that has begun to write; empty if none has begun, or if its engine gives none."""

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def output_tokens(self) -> int:
        """Number of tokens that the unfinished choices have written so far."""
        return sum(len(choice.output) for choice in self.choices.values())

    def cut(self, group: RequestId) -> GroupDelta | None:
        """Ends all choices where they are. Returns the delta that says so, or None if none is left."""
        logprobs = None if self._request.sampling.logprobs is None else ()
        ended = tuple(ChoiceDelta(index, (), logprobs, Finish(FinishReason.ABORT)) for index in self.choices)
        self.choices.clear()
        return GroupDelta(group, ended) if ended else None

    def rest(self, life: int) -> GenerateRequest:
        """Returns a group of the unfinished choices for another worker. `life`: number of workers that had it before.

        It gets another name each time, since a worker that was lost may still know the old one. It has no ticket: a
        ticket is read once.
        """
        request = self._request
        if life == 0 and len(self.choices) == len(request.choices) and request.ticket is None:
            return request
        sampling = request.sampling
        if self.prompt.reported and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            request,
            request_id=RequestId(f"{request.request_id}.{life}") if life else request.request_id,
            choices=tuple(
                ChoiceStart(index, choice.seed, tuple(choice.output)) for index, choice in self.choices.items()
            ),
            sampling=sampling,
            ticket=None,
            model_digest=self.model_digest,
        )
