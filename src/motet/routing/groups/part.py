"""All choices of a group, or some of them, on one worker at a time (`Part`); all parts of a group (`GroupParts`).

A `Part` reads the stream of its worker for its own reader. When that worker dies, falls silent or leaves, the
unfinished choices become a new group of `ChoiceStart(index, seed, output_tokens)` for another worker (`PartMover`). The
reader sees a pause.

A group is one part or, if it is large, several, each on a worker of its own. Each is placed, moved and ended
separately."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from itertools import islice

import msgspec

from motet.engine_info import weights_of
from motet.errors import EngineDiedError, MotetError, OverloadedError
from motet.ids import RequestId
from motet.merge import Merge, deliver
from motet.routing.groups.dispatch import Dispatcher
from motet.routing.groups.migration import GENERATING, GroupState, Moves
from motet.routing.groups.part_mover import PartMover
from motet.routing.groups.placement import Placement
from motet.routing.groups.tickets import HeldTicket
from motet.routing.groups.unfinished import Unfinished
from motet.types import GroupDelta

DELTAS_PER_PART = 2
"""Maximum number of unread deltas per part of a group in several parts; above it, the parts wait for the reader."""


class Part(AsyncIterator[GroupDelta]):
    """The stream of a part. It has one reader at a time."""

    def __init__(
        self, unfinished: Unfinished, *, dispatcher: Dispatcher, moves: Moves, held: HeldTicket | None
    ) -> None:
        self.unfinished = unfinished
        self.on_end: Callable[[], Awaitable[None]] | None = None
        """Awaited before the reader gets the end. Set if the part is the entire group."""
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
                differs = placement.renamed or not placement.started or delta.worker
                reader_delta = self._reader_delta(placement, delta) if differs else delta
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
            if not unfinished.model_digest:
                unfinished.model_digest = weights_of(placement.worker.engine.info, unfinished.request.model)
            prompt = unfinished.prompt.first(prompt)
            unfinished.started = True
        return GroupDelta(unfinished.reader_id, delta.choices, prompt, worker, delta.weight_version)

    def _ended_on(self, placement: Placement, error: MotetError | None) -> None:
        placement.close(error)
        if error is not None:
            error = error.of_worker(placement.member.id, remote=not placement.worker.local)
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


class GroupParts:
    """The parts of one group; none until `place`."""

    def __init__(self, dispatcher: Dispatcher, *, moves: Callable[[], Moves]) -> None:
        """`moves`: makes the `Moves` of each part."""
        self.stream: Part | Merge[GroupDelta] | None = None
        """The deltas of the group. None before the parts have been placed."""
        self._dispatcher = dispatcher
        self._moves = moves
        self._parts: Sequence[Part] = ()

    def place(
        self,
        unfinished: Unfinished,
        sizes: Sequence[int],
        *,
        held: HeldTicket | None,
        may_wait: bool,
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        """Gives every part to a worker. `may_wait`: see `Part.start`. `on_end`: awaited before the stream ends."""
        self._parts = parts = self._split(unfinished, sizes, held=held)
        if held is not None:
            for _ in range(len(sizes) - len(parts)):
                held.release()
        for part in parts:
            part.start(may_wait=may_wait)
        if len(parts) == 1:
            parts[0].on_end = on_end
            self.stream = parts[0]
        else:
            self.stream = merge = Merge[GroupDelta](DELTAS_PER_PART * len(parts), on_end=on_end)
            for part in parts:
                merge.add(partial(deliver, part))

    async def stop(self, index: int) -> None:
        for part in self._parts:
            if index in part.unfinished.choices:
                await part.stop(index)

    async def abort(self) -> None:
        for part in self._parts:
            await part.abort()

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()

    async def aclose(self) -> None:
        """Closes all parts, which frees their choices, tickets and tasks."""
        try:
            if isinstance(self.stream, Merge):
                await self.stream.aclose()
            closing = [part.aclose() for part in self._parts]
            await (closing[0] if len(closing) == 1 else asyncio.gather(*closing))
        finally:
            if isinstance(self.stream, Part):
                self.stream.on_end = None  # breaks a reference cycle, which only a full garbage collection would free

    def _split(self, unfinished: Unfinished, sizes: Sequence[int], *, held: HeldTicket | None) -> Sequence[Part]:
        """Returns one part for each size, until no choices are left. A single part has the group's id."""
        make = partial(Part, dispatcher=self._dispatcher, held=held)
        if len(sizes) == 1:
            return [make(unfinished, moves=self._moves())]
        request, id = unfinished.request, unfinished.request.request_id
        left = iter(unfinished.remaining_request(0).choices)
        parts = []
        for number, size in enumerate(sizes):
            if choices := tuple(islice(left, size)):
                part = msgspec.structs.replace(request, request_id=RequestId(f"{id}/{number}"), choices=choices)
                of_part = Unfinished(part, reader_id=id, prompt=unfinished.prompt)
                parts.append(make(of_part, moves=self._moves()))
        return parts
