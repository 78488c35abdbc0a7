"""Sends requests for text models to a worker that takes texts, and to another worker if the first one fails.

chosen by    1. has not just refused or failed       2. fewest open choices; the session's last worker counts as having
             `SESSION_CHOICES` fewer                 3. longest time since its last request
tried again  once, on another worker if there is one, and only before any of the answer has arrived: later the request
             fails with its worker, because no other server can continue a text that this server has started
"""

import logging
from collections.abc import Sequence

import msgspec

from motet.engines.upstream.text_source import TextGenerate, TextGroupStream, TextRequest, TextStep, may_go_elsewhere
from motet.errors import (
    MotetError,
    NoWorkerError,
    RateLimitedError,
    UpstreamRefusalError,
    WorkerFaultError,
)
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.routing.workers.open_groups import OpenGroup
from motet.routing.workers.serving import WorkKind
from motet.types import FinishReason, Usage

logger = logging.getLogger(__name__)

SESSION_CHOICES = 8
"""A session stays on its last worker even if that worker has up to this number of open choices more than the others."""
MAX_TRIES = 2


class TextRouter:
    """Chooses workers for the requests for all text models of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._sources: dict[str, TextGenerate] = {}
        self._last_turns: dict[str, int] = {}
        """The turn in which each worker got its last request."""
        self._turn = 0

    def put(self, id: str, generate: TextGenerate) -> None:
        """Sets the function that generates on a worker. Must be called before the fleet has the worker as ready."""
        self._sources[id] = generate

    def remove(self, id: str) -> None:
        """Removes a worker that has left."""
        self._sources.pop(id, None)
        self._last_turns.pop(id, None)

    def generate(self, request: TextRequest) -> "RoutedTextGroup":
        return RoutedTextGroup(self, request)

    def of(self, model: str) -> TextGenerate:
        """Returns a function that generates with a model, by its name on the workers, not the clients' name."""
        return lambda request: self.generate(msgspec.structs.replace(request, model=model))

    def choose(self, request: TextRequest, *, tried: Sequence[Member]) -> tuple[Member, TextGenerate]:
        """Returns the worker, one in `tried` only as a last choice. Raises NoWorkerError if none has the model."""
        members = [member for member in self.fleet.catalog.texts(request.model) if member.id in self._sources]
        if not members:
            raise NoWorkerError(f"No server that has the model `{request.model}` is available now.")
        sessions = self.fleet.sessions[WorkKind.GENERATE]
        last = sessions.worker_of(request.session_id)

        def rank(member: Member) -> tuple[bool, bool, int, int]:
            open_choices = member.load.open_choices - (SESSION_CHOICES if member.id == last else 0)
            return member in tried, member.faults.refused, open_choices, self._last_turns.get(member.id, 0)

        chosen = min(members, key=rank)
        self._turn += 1
        self._last_turns[chosen.id] = self._turn
        sessions.record(request.session_id, chosen.id)
        chosen.last_decision = _reason(chosen, members, is_last=chosen.id == last, tried=tried)
        return chosen, self._sources[chosen.id]


class RoutedTextGroup:
    """A `TextGroupStream` on one worker after the other."""

    def __init__(self, router: TextRouter, request: TextRequest) -> None:
        self._router = router
        self._request = request
        self._tried: list[Member] = []
        self._stream: TextGroupStream | None = None
        """The answer of the current worker, which is the last one of `_tried`."""
        self._group: OpenGroup | None = None
        """The open choices on the current worker."""
        self._to_end: set[int] = set()
        """Choices that this server has ended, and whose last pieces have not been read."""
        self._started = False
        """True once a part of the answer has arrived."""
        self._closed = False
        self._error: MotetError | None = None
        """The error with which the previous worker failed."""

    @property
    def worker(self) -> str:
        return self._tried[-1].id if self._tried else ""

    @property
    def usage(self) -> Usage | None:
        return None if self._stream is None else self._stream.usage

    async def read(self) -> Sequence[TextStep]:
        while True:
            stream = self._stream or self._open()
            try:
                steps = await self._read(stream)
            except MotetError as error:
                await self._leave()
                error = error.of_worker(self.worker, remote=True)
                if not self._can_try_again(error):
                    raise error
                self._error = error
            else:
                self._record(steps)
                return steps

    def start(self, indices: Sequence[int]) -> None:
        assert self._request.start is not None  # otherwise all choices start with the request
        self._request = msgspec.structs.replace(self._request, start=(*self._request.start, *indices))
        if self._stream is not None:
            self._stream.start(indices)
            self._count_open(len(indices))

    def end_choice(self, index: int) -> None:
        """Ends a choice early. If no worker has the request, the next worker does not generate the choice."""
        self._to_end.add(index)
        if self._stream is not None:
            self._stream.end_choice(index)

    def fail(self, error: MotetError) -> None:
        if self._stream is not None:
            self._stream.fail(error)

    async def aclose(self) -> None:
        self._closed = True
        await self._leave()

    def _open(self) -> TextGroupStream:
        try:
            member, generate = self._router.choose(self._request, tried=self._tried)
        except NoWorkerError as error:
            raise self._error or error from None
        self._tried.append(member)
        self._stream = generate(self._request)
        self._count_open(self._request.num_started)
        for index in self._to_end:
            self._stream.end_choice(index)
        return self._stream

    async def _read(self, stream: TextGroupStream) -> Sequence[TextStep]:
        """Raises only MotetError, whatever the server has sent."""
        try:
            return await stream.read()
        except MotetError:
            raise
        except Exception as error:
            logger.exception("an answer of %s cannot be processed", self.worker)
            why = f"its answer cannot be processed ({type(error).__name__}): the log has more"
            raise WorkerFaultError(why) from error

    def _record(self, steps: Sequence[TextStep]) -> None:
        """Records the ends of choices, and the end of the answer if there are no steps."""
        ended = [piece for step in steps for piece in step.pieces if piece.finish is not None]
        # If the upstream server aborts, the group gets an error. So this server has ended these choices.
        ended_here = {piece.index for piece in ended if piece.finish is FinishReason.ABORT}
        if ended_here and self._request.start is not None:
            self._to_end -= ended_here
            left = tuple(index for index in self._request.start if index not in ended_here)
            self._request = msgspec.structs.replace(self._request, start=left)
        if not ended_here or sum(len(step.pieces) for step in steps) > len(ended_here):
            self._started = True
            self._tried[-1].groups.received = True
        if self._group is not None:
            self._group.remove_choices(len(ended))
            if not steps:
                self._group.close()

    def _can_try_again(self, error: MotetError) -> bool:
        """Returns True if the request should be sent to another worker. Records that this worker refused or failed."""
        elsewhere = may_go_elsewhere(error)
        if isinstance(error, WorkerFaultError):
            self._router.fleet.distrust(self._tried[-1].id, why=error.message)
        if elsewhere or (isinstance(error, UpstreamRefusalError) and error.status == RateLimitedError.status):
            self._tried[-1].faults.record_refusal()
        return elsewhere and not self._started and not self._closed and len(self._tried) < MAX_TRIES

    async def _leave(self) -> None:
        """Ends the request on its worker, if it has one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            if self._group is not None:
                self._group.close()
            await stream.aclose()

    def _count_open(self, choices: int) -> None:
        """Adds open choices to the load of the current worker."""
        if self._group is not None and self._group.is_open:
            self._group.add_choices(choices)
        else:
            member = self._tried[-1]
            self._group = OpenGroup(member.load, member.groups, choices=choices, end=self._end)

    async def _end(self, error: MotetError) -> None:
        """Called when the worker leaves, or is lost."""
        self.fail(error)


def _reason(chosen: Member, members: Sequence[Member], *, is_last: bool, tried: Sequence[Member]) -> str:
    """Returns the reason of a choice. `is_last`: the worker is the session's last one."""
    if chosen in tried:
        return "tried once more: there is no other worker"
    if tried:
        return f"after {tried[-1].id} failed"
    if is_last:
        return f"its session was here, {chosen.load.open_choices} open choices"
    return f"{chosen.load.open_choices} open choices, the fewest of {len(members)}"
