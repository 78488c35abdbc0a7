"""All choices of a group, or some of them, on one worker at a time.

A `Part` reads the stream of its worker for its own reader. When that worker dies, falls silent or leaves, the
unfinished choices become a new group of `ChoiceStart(index, seed, output_tokens)` for another worker (`PartMover`). The
reader sees a pause.
"""

from collections.abc import AsyncIterator, Awaitable, Callable

from motet.errors import EngineDiedError, MotetError, OverloadedError
from motet.routing.groups.dispatch import Dispatcher
from motet.routing.groups.group_state import GENERATING, GroupState
from motet.routing.groups.migration import Moves
from motet.routing.groups.part_mover import PartMover
from motet.routing.groups.placement import Placement
from motet.routing.groups.tickets import HeldTicket
from motet.routing.groups.unfinished import Unfinished
from motet.types import GroupDelta


class Part(AsyncIterator[GroupDelta]):
    """The stream of a part. It has one reader at a time."""

    def __init__(
        self, unfinished: Unfinished, *, dispatcher: Dispatcher, moves: Moves, held: HeldTicket | None
    ) -> None:
        self.unfinished = unfinished
        self.on_end: Callable[[], Awaitable[None]] | None = None
        """Awaited before the reader gets the end. A journey sets it if the part is the entire group."""
        self._mover = PartMover(unfinished, dispatcher=dispatcher, moves=moves, held=held)
        self._chooser = dispatcher.chooser
        self._aborted = False
        """True once `abort` has been called."""

    def start(self, *, may_wait: bool) -> None:
        """Gives the choices to their first worker. If that worker refuses them, they move to another worker if
        `may_wait`; otherwise the error is raised."""
        try:
            self._mover.place()
        except MotetError as error:
            if not may_wait:
                self._mover.end(error)
                raise
            self._mover.lose(error)

    async def __anext__(self) -> GroupDelta:
        """Returns the next delta. Raises StopAsyncIteration after the last one, or the error that ended the part."""
        mover = self._mover
        while True:
            if mover.state is not GENERATING:
                await mover.wait_moved()
                if mover.state is GroupState.OVER:
                    return await self._end()
            placement = mover.placement
            assert placement is not None  # the part is on a worker
            check = placement.response_check
            try:
                delta = await (placement.stream.__anext__() if check is None else placement.checked(check))
            except StopAsyncIteration:
                self._ended_on(placement, placement.group.evicted)
            except MotetError as error:
                if isinstance(error, EngineDiedError | OverloadedError):
                    self._chooser.record_failure(placement.member, placement.worker, error=error)
                self._ended_on(placement, error)
            else:
                if placement.renamed or not placement.started or delta.worker:
                    reader_delta = self._reader_delta(placement, delta)
                else:
                    reader_delta = delta
                placement.record(delta)
                return reader_delta

    async def stop(self, index: int) -> None:
        """Ends one choice early. While the part moves, the next worker does not get the choice."""
        placement = self._mover.placement
        if placement is None:
            self.unfinished.choices.pop(index, None)
        else:
            placement.remove(index)
        if placement is not None and self._mover.state is GENERATING:
            await placement.worker.engine.stop_choice(placement.request.request_id, index)
        elif not self.unfinished:
            self._mover.interrupt(None)

    async def abort(self) -> None:
        """Ends all choices early. The reader gets the tokens generated so far, and the end of each choice."""
        self._aborted = True
        placement = self._mover.placement
        if placement is not None and self._mover.state is GENERATING:
            await placement.stream.aclose()
        else:
            self._mover.interrupt(None)

    def abandon(self) -> None:
        """Ends a wait for a worker, because the server is closing."""
        self._mover.abandon()

    async def aclose(self) -> None:
        """Ends the part, and frees its choices, tickets and task. Can be called at any time, also twice."""
        self._mover.interrupt(None)
        await self._mover.close()

    def _reader_delta(self, placement: Placement, delta: GroupDelta) -> GroupDelta:
        """Returns a worker's delta with the group id and the worker id for the reader. The first delta of a placement
        ends the move, if any."""
        unfinished, prompt = self.unfinished, delta.prompt
        worker = placement.member.id if placement.renamed or not placement.started else ""
        if not placement.started:
            self._mover.resumed()
            unfinished.model_digest = unfinished.model_digest or placement.worker.engine.info.model_digest
            prompt = unfinished.prompt.first(prompt)
            unfinished.started = True
        return GroupDelta(unfinished.reader_id, delta.choices, prompt, worker, delta.weight_version)

    def _ended_on(self, placement: Placement, error: MotetError | None) -> None:
        """Called when the stream of the part's worker has ended."""
        placement.close(error)
        if error is None or self._aborted:
            self._mover.end(None)
        else:
            self._mover.lose(error)

    async def _end(self) -> GroupDelta:
        """Returns the ends of aborted choices, once. Otherwise raises the error of the part, or StopAsyncIteration."""
        if self.on_end is not None:
            await self.on_end()
        if self._mover.error is not None:
            raise self._mover.error
        if self._aborted and (last := self.unfinished.abort()) is not None:
            return last
        raise StopAsyncIteration
