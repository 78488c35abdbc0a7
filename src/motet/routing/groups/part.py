"""Choices of a group, all or some of them, on one worker at a time, wherever they move to.

A `Part` reads its worker's stream for its own reader. When that worker dies, falls silent or leaves, the unfinished
choices become a new group of `ChoiceStart(index, seed, written)` for another worker; the reader sees a pause.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from enum import Enum, auto

import msgspec

from motet.errors import EngineClosedError, EngineDiedError, MotetError, OverloadedError
from motet.ids import RequestId
from motet.routing.choosing.survey import readers_of
from motet.routing.groups.dispatch import Dispatcher, HeldTicket, Placement
from motet.routing.groups.migration import Cause, MoveOutcome, Moves, Unfinished, cause_of
from motet.tracing.spans import NO_SPAN
from motet.types import GenerateRequest, GroupDelta

logger = logging.getLogger(__name__)


class GroupState(Enum):
    """The state of a group, or of a part of it."""

    QUEUED = auto()
    PREFILLING = auto()
    WRITING = auto()
    MOVING = auto()
    OVER = auto()


WRITING = GroupState.WRITING  # looked at for each token, where `GroupState.WRITING` takes 50 ns in Python 3.11
NEXT: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.QUEUED: frozenset({GroupState.PREFILLING, GroupState.WRITING, GroupState.MOVING, GroupState.OVER}),
    GroupState.PREFILLING: frozenset({GroupState.WRITING, GroupState.MOVING, GroupState.OVER}),
    GroupState.WRITING: frozenset({GroupState.MOVING, GroupState.OVER}),
    GroupState.MOVING: frozenset({GroupState.PREFILLING, GroupState.WRITING, GroupState.OVER}),
    GroupState.OVER: frozenset(),
}
"""The allowed moves. A part that no worker takes at first goes from QUEUED to MOVING."""


def moved(old: GroupState, new: GroupState) -> GroupState:
    """Returns `new`. Raises AssertionError if no move leads there."""
    if new is not old and new not in NEXT[old]:
        raise AssertionError(f"a group cannot go from {old.name} to {new.name}")
    return new


class _Ended(Exception):
    """Raised when a part is over: with an error, or because nothing is left to write."""

    def __init__(self, error: MotetError | None) -> None:
        super().__init__()
        self.error = error


class Part(AsyncIterator[GroupDelta]):
    """Choices of a group, all or some of them, on one worker at a time. One reader at a time reads it."""

    def __init__(
        self,
        request: GenerateRequest,
        unfinished: Unfinished,
        *,
        dispatcher: Dispatcher,
        moves: Moves,
        reader_id: RequestId,
        held: HeldTicket | None,
    ) -> None:
        """`reader_id`: the group's name in the deltas for the reader."""
        self.request = request
        self.unfinished = unfinished
        self.state = GroupState.QUEUED
        self._dispatcher = dispatcher
        self._moves = moves
        self._reader_id = reader_id
        self._held = held
        self.over: Callable[[], Awaitable[None]] | None = None
        """Awaited before the reader gets the end. A journey sets it if the part is the whole group."""
        self._tickets = [] if held is None else [held]
        """Every ticket that the part has had."""
        self._lives = 0
        """Number of workers it has had."""
        self._stay: Placement | None = None
        self._renames = False
        """True if the group has another name on the present worker than its reader knows."""
        self._moving: asyncio.Task[None] | None = None
        self._error: MotetError | None = None
        self._abandoned = False
        self._cut = False
        """True if its choices end where they are."""
        self._move_span = NO_SPAN
        """The span of the present move."""

    def start(self, *, may_wait: bool) -> None:
        """Gives the choices to a worker for the first time. If it refuses them, another one is tried if they
        `may_wait`; else the error is raised."""
        try:
            self._place()
        except MotetError as error:
            if not may_wait:
                self._finish(error)
                raise
            self._lose(error)

    async def __anext__(self) -> GroupDelta:
        """Returns the next delta. Raises StopAsyncIteration after the last one, or the error that ended the part."""
        while True:
            if self.state is not WRITING:
                try:
                    await self._until_writing()
                except StopAsyncIteration:
                    if self._cut and (last := self.unfinished.cut(self._reader_id)) is not None:
                        return last
                    raise
            stay = self._stay
            assert stay is not None  # it writes
            try:
                delta = await (stay.stream.__anext__() if stay.word is None else stay.checked(stay.word))
            except StopAsyncIteration:
                self._ended_there(stay, stay.evicted)
            except MotetError as error:
                if isinstance(error, EngineDiedError | OverloadedError):
                    self._dispatcher.failed(stay.member, stay.worker, error=error)
                self._ended_there(stay, error)
            else:
                shown = self._shown(stay, delta) if self._renames or not stay.begun or delta.worker else delta
                stay.take(delta)
                return shown

    async def stop(self, index: int) -> None:
        """Ends one choice early. While the part moves, the choice is left out for the next worker."""
        stay = self._stay
        if stay is None:
            self.unfinished.choices.pop(index, None)
        else:
            stay.drop(index)
        if stay is not None and self.state is GroupState.WRITING:
            await stay.worker.engine.stop_choice(stay.request.request_id, index)
        elif not self.unfinished:
            self._interrupt(None)

    async def cut(self) -> None:
        """Ends all choices where they are; the reader gets what was written, and that end."""
        self._cut = True
        if self._stay is not None and self.state is GroupState.WRITING:
            await self._stay.stream.aclose()
        else:
            self._interrupt(None)

    def abandon(self) -> None:
        """Ends a wait for a worker, since the server is closing."""
        self._abandoned = True
        if self._moving is not None and not self._moving.done():
            self._interrupt(EngineClosedError("the server is closing"))

    async def aclose(self) -> None:
        """Frees all that the part has. May be called at any time, twice too."""
        self._interrupt(None)
        if self._moving is not None:
            await asyncio.wait((self._moving,))
        if self._stay is not None:
            await self._stay.stream.aclose()
        for held in self._tickets:
            await held.released()

    def _place(self) -> None:
        """Gives the unfinished choices to a worker, with the ticket if that worker can read it."""
        held, fleet = self._held, self._dispatcher.fleet
        if held is not None and not readers_of(held.ticket, fleet, model=self.request.model).members:
            self._settle(read=False)
        request = self.unfinished.rest(self._lives)
        if self._held is not None:
            request = msgspec.structs.replace(request, ticket=self._held.ticket)
        try:
            self._stay = self._dispatcher.give(request, self.unfinished)
        except BaseException:
            self._settle(read=False)
            raise
        if self._held is not None and not self._held.ours:
            self._settle(read=True)  # from now on its worker notifies the lease
        self._renames = request.request_id != self._reader_id
        self._lives += 1
        self._go(GroupState.WRITING)

    def _shown(self, stay: Placement, delta: GroupDelta) -> GroupDelta:
        """Returns the reader's form of a worker's first delta, or of one with another group or worker name."""
        prompt, worker = delta.prompt, stay.member.id if self._renames or not stay.begun else ""
        if not stay.begun:
            self._moves.resumed(self.unfinished)
            self._end_move(None)
            self._settle(read=True)
            self.unfinished.model_digest = self.unfinished.model_digest or stay.worker.engine.info.model_digest
            prompt = self.unfinished.prompt.first(prompt)
            self.unfinished.begun = True
        return GroupDelta(self._reader_id, delta.choices, prompt, worker, delta.weight_version)

    def _ended_there(self, stay: Placement, error: MotetError | None) -> None:
        """Called when the stream of the part's worker has ended."""
        stay.close_books(error)
        if error is None or self._cut:
            self._finish(None)
        else:
            self._lose(error)

    def _lose(self, error: MotetError) -> None:
        """Moves the part, or ends it: its worker is lost, or none took it."""
        self._settle(read=False)
        try:
            cause = self._begin(error)
        except _Ended as end:
            self._finish(end.error)
        else:
            self._go(GroupState.MOVING)
            if self._move_span is NO_SPAN:
                group = self._dispatcher.tracer.of(self.request.traceparent)
                self._move_span = group.child("move", {"motet.move.cause": cause.value})
            self._moving = asyncio.create_task(self._move(cause, error))

    def _begin(self, error: MotetError) -> Cause:
        """Returns the cause of a move. Raises _Ended if the part may not move."""
        if not self.unfinished:
            raise _Ended(None)
        if self._abandoned:
            raise _Ended(EngineClosedError("the server is closing"))
        cause = cause_of(error)
        if cause is None and not isinstance(error, EngineClosedError):
            self._moves.end(MoveOutcome.FAILED)
        if cause is None or not self._moves.begin(cause, begun=self.unfinished.begun):
            raise _Ended(error)
        return cause

    async def _move(self, cause: Cause, error: MotetError) -> None:
        """Tries workers until one has the part, or it is over. It runs in a task, so that it goes on if the reader is
        cancelled."""
        left = self._stay
        if left is not None:
            await left.stream.aclose()
        fleet = self._dispatcher.fleet
        try:
            while self.state is not GroupState.WRITING:
                patience_s = self._moves.patience_s(cause, hopeful=fleet.serving(self.request.model).hopeful)
                if patience_s is None:
                    raise _Ended(error)
                if patience_s > 0:
                    changed = fleet.changed()
                    try:
                        await asyncio.wait((changed,), timeout=patience_s)
                    finally:
                        changed.cancel()
                try:
                    await self._submit()
                except MotetError as again:
                    self._go(GroupState.MOVING)
                    cause = self._begin(again)
            self._log_move(cause, left)
        except _Ended as end:
            self._finish(end.error)

    async def _submit(self) -> None:
        """Gives the part to another worker, after a prefill if that pays."""
        rest = self.unfinished.rest(self._lives)
        if self._dispatcher.asks_prefill(rest):
            self._go(GroupState.PREFILLING)
            self._dispatcher.on_the_way.add(self.unfinished)
            try:
                ticket = await self._dispatcher.ticket(rest)
            finally:
                self._dispatcher.on_the_way.discard(self.unfinished)
            if ticket is not None:
                self._held = HeldTicket(ticket, self._dispatcher, parts=1, trace=self.request.trace)
                self._tickets.append(self._held)
        self._place()

    async def _until_writing(self) -> None:
        """Waits while the part moves; raises what its reader gets when it is over. A reader that is cancelled meanwhile
        does not end the move."""
        while self.state is not GroupState.WRITING:
            if self.state is GroupState.OVER:
                if self.over is not None:
                    await self.over()
                raise self._error or StopAsyncIteration
            moving = self._moving
            assert moving is not None  # neither on a worker nor over
            await asyncio.wait((moving,))
            if not moving.cancelled():
                moving.result()  # the reader gets a bug's error

    def _log_move(self, cause: Cause, left: Placement | None) -> None:
        """`left`: the stay on the former worker; None if no worker had taken it."""
        stay = self._stay
        fields = {
            "request_id": self.request.trace,
            "group": self.request.request_id,
            "cause": cause.value,
            "choices": len(self.unfinished),
            "output_tokens": self.unfinished.output_tokens,
        }
        if left is not None and stay is not None:
            fingerprints = {one.worker.engine.info.fingerprint for one in (left, stay)}
            fields["fingerprint"] = "equal" if len(fingerprints) == 1 else "other"
            fields |= {"from": left.member.id, "to": stay.member.id}
        logger.warning("a group goes on elsewhere", extra={"fields": fields})
        told = ("choices", "output_tokens", "fingerprint", "from", "to")
        self._move_span.note({f"motet.move.{name}": fields[name] for name in told if name in fields})

    def _end_move(self, error: MotetError | None) -> None:
        """Ends the span of the present move, if there is one."""
        span, self._move_span = self._move_span, NO_SPAN
        span.fail(error)

    def _interrupt(self, error: MotetError | None) -> None:
        """Ends the part in any state."""
        self._finish(error)
        if self._moving is not None:
            self._moving.cancel()

    def _settle(self, *, read: bool) -> None:
        """Settles the ticket, which the part does not need any more."""
        held, self._held = self._held, None
        if held is not None:
            held.settled(read=read)

    def _finish(self, error: MotetError | None) -> None:
        """Ends the part; a second call changes nothing."""
        if self.state is GroupState.OVER:
            return
        self._error = error
        self._go(GroupState.OVER)
        self._settle(read=False)
        self._moves.end(MoveOutcome.CLOSED)
        self._end_move(error)
        if self._stay is not None:
            self._stay.close_books()

    def _go(self, state: GroupState) -> None:
        self.state = moved(self.state, state)
