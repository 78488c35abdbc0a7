"""The life of a group in the router: one object from the moment it comes until nothing of it is left.

    QUEUED ──► PREFILLING ──► WRITING ⇄ MOVING ──► OVER          any state may end in OVER

1. QUEUED       no worker has room yet; `begin` ends the wait. If there is room, a group stays here only for one call
2. PREFILLING   a prefill worker computes the prompt, once for all parts
3. WRITING      each part's choices are on one worker; the reader of the journey reads the worker's stream
4. MOVING       the worker of a part was lost: its unfinished choices go on elsewhere from the tokens that they have,
                with another prefill if that pays. The reader sees a pause
5. OVER         all choices have ended, or an error ended them, or the reader left

A group is one `Part`; a large one may be several, each on a worker of its own, placed, moved and ended by itself. Who
frees what: the journey owns a ticket from its grant until every part has read it (`HeldTicket`); whatever ends a stay
closes its books; the tasks that wait for prefill or for a worker end with the journey.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import msgspec

from motet.errors import MotetError, NoWorkerError
from motet.ids import RequestId
from motet.merge import Merge, deliver
from motet.routing.groups.dispatch import Dispatcher, HeldTicket
from motet.routing.groups.migration import Moves, Unfinished
from motet.routing.groups.part import GroupState, Part, moved
from motet.types import GenerateRequest, GroupDelta

DELTAS_PER_PART = 2
"""Unread deltas of a group in several parts, for each part, above which the parts wait for the reader."""


class Journey:
    """A `GroupStream`. `ended` is called once, when nothing of the group is left."""

    def __init__(
        self,
        request: GenerateRequest,
        dispatcher: Dispatcher,
        *,
        moves: Callable[[], Moves],
        now_s: float,
        ended: Callable[["Journey"], None],
    ) -> None:
        """`moves`: makes the `Moves` of each part."""
        self.request = request
        self.since_s = now_s
        self.state = GroupState.QUEUED
        self._dispatcher = dispatcher
        self._moves = moves
        self._ended = ended
        self._unfinished = Unfinished(request)
        """The choices that were not stopped, until there are parts."""
        ticket = request.ticket
        self._held = (
            None if ticket is None else HeldTicket(ticket, dispatcher, parts=1, trace=request.trace, ours=False)
        )
        self._parts: tuple[Part, ...] = ()
        self._source: Part | Merge[GroupDelta] | None = None
        """The source of deltas, once the group is on its way to decode."""
        self._turn = asyncio.Event()
        """Set when there is something to read, or there never will be."""
        self._prefilling: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._cut = False
        self._ending: asyncio.Task[None] | None = None
        self._queued = dispatcher.tracer.of(request.traceparent).child("queue")

    @property
    def num_choices(self) -> int:
        """Number of choices to write, while the group waits."""
        return len(self._unfinished)

    @property
    def waits(self) -> bool:
        """True while it has not begun."""
        return self.state is GroupState.QUEUED

    @property
    def ending(self) -> bool:
        """True once somebody has asked for the end."""
        return self._ending is not None

    def begin(self) -> None:
        """Places the group, since there is room for it. If it is refused before anything runs, the error is raised and
        the group is over."""
        dispatcher, request = self._dispatcher, self._unfinished.rest(0)
        try:
            apart = self.request.ticket is None and dispatcher.asks_prefill(request)
            whole = request if self.request.ticket is None else self.request
            plan = dispatcher.plan(whole, apart=apart)
            if apart:
                self._go(GroupState.PREFILLING)
                dispatcher.on_the_way.add(self._unfinished)
                self._prefilling = asyncio.create_task(self._prefill(plan))
            else:
                self._give(plan, may_wait=len(plan) > 1)
        except BaseException:
            self._go(GroupState.OVER)
            raise

    def fail(self, error: Exception) -> None:
        """Ends a group that waits for room, or for prefill; its reader gets `error`."""
        self._error = self._error or error
        if self._prefilling is not None:
            self._prefilling.cancel()
        self._turn.set()

    async def abandon(self, error: MotetError) -> None:
        """Ends all waiting, since the server is closing. Choices that are being written end with their engine."""
        if self._source is None:
            self.fail(error)
            await self.aclose()
        for part in self._parts:
            part.abandon()

    async def cut(self) -> None:
        """Ends all choices where they are; the reader gets what was written, and that end."""
        if self._source is None:
            self._cut = True
            await self.aclose()
        for part in self._parts:
            await part.cut()

    def __aiter__(self) -> AsyncIterator[GroupDelta]:
        return self._source or self  # a frame less for each token

    async def __anext__(self) -> GroupDelta:
        await self._turn.wait()
        if self._source is None:
            await self.aclose()
            if self._cut and (last := self._unfinished.cut(self.request.request_id)) is not None:
                return last
            raise self._error or StopAsyncIteration
        return await anext(self._source)

    async def aclose(self) -> None:
        """Ends the group, also if the caller is cancelled meanwhile."""
        if self._ending is None:
            if self._prefilling is not None:
                self._prefilling.cancel()
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def stop(self, index: int) -> None:
        """Ends one choice early. Before decode has the group, the choice is taken out of it."""
        if self._source is None:
            self._unfinished.choices.pop(index, None)
            if not self._unfinished:
                await self.aclose()
            return
        for part in self._parts:
            if index in part.unfinished.choices:
                await part.stop(index)

    async def _prefill(self, plan: list[int]) -> None:
        """Gets the ticket, then gives the group to decode."""
        try:
            async with self._dispatcher.prefill_turn(self.request, parts=len(plan)) as turn:
                if len(plan) > 1 or not self._joins():
                    plan = await self._get_ticket(plan)
                    turn.failed = self._held is None
                self._dispatcher.on_the_way.discard(self._unfinished)
                self._give(plan, may_wait=True)
        except Exception as error:  # handed to the reader, who raises it
            self.fail(error)

    def _joins(self) -> bool:
        """Returns True if no prefill is needed any more, since the decode worker that would get the group has got its
        prompt for another one meanwhile."""
        with suppress(NoWorkerError):
            return not self._dispatcher.asks_prefill(self._unfinished.rest(0))
        return False

    async def _get_ticket(self, plan: list[int]) -> list[int]:
        """Returns the plan for the ticket that it has got: without one every part would compute the prompt, so then
        there is only one."""
        ticket = await self._dispatcher.ticket(self.request, readers=len(plan))
        if ticket is None or ticket.readers < len(plan):
            plan = [len(self._unfinished)]
        if ticket is not None:
            self._held = HeldTicket(ticket, self._dispatcher, parts=len(plan), trace=self.request.trace)
        return plan

    def _give(self, plan: Sequence[int], *, may_wait: bool) -> None:
        """Gives every part to a worker."""
        self._go(GroupState.WRITING)
        held, self._held = self._held, None
        self._parts = tuple(self._split(plan, held))
        for _ in range(len(plan) - len(self._parts)):
            if held is not None:
                held.settled(read=False)
        for part in self._parts:
            part.start(may_wait=may_wait)
        if len(self._parts) == 1:
            self._source = self._parts[0]
            self._source.over = self.aclose
        else:
            self._source = Merge(DELTAS_PER_PART * len(self._parts), on_end=self.aclose)
            for part in self._parts:
                self._source.add(partial(deliver, part))
        self._turn.set()

    def _split(self, plan: Sequence[int], held: HeldTicket | None) -> "list[Part]":
        """Returns a part for each number in the plan while choices are left; a single part has the group's name."""
        request, id = self.request, self.request.request_id
        make = partial(Part, dispatcher=self._dispatcher, reader_id=id, held=held)
        if len(plan) == 1:
            return [make(request, self._unfinished, moves=self._moves())]
        parts = []
        left = iter(self._unfinished.rest(0).choices)
        for number, size in enumerate(plan):
            if choices := tuple(islice(left, size)):
                part = msgspec.structs.replace(request, request_id=RequestId(f"{id}/{number}"), choices=choices)
                parts.append(make(part, Unfinished(part, prompt=self._unfinished.prompt), moves=self._moves()))
        return parts

    async def _end(self) -> None:
        try:
            if self._prefilling is not None:
                await asyncio.wait((self._prefilling,))
            if isinstance(self._source, Merge):
                await self._source.aclose()
            closing = [part.aclose() for part in self._parts]
            await (closing[0] if len(closing) == 1 else asyncio.gather(*closing))
            held, self._held = self._held, None
            if held is not None:  # no part has got it
                held.settled(read=False)
                await held.released()
        finally:
            self._dispatcher.on_the_way.discard(self._unfinished)
            self._go(GroupState.OVER)
            self._turn.set()
            if isinstance(self._source, Part):
                self._source.over = None  # else the two would hold each other until a full garbage collection
            self._ended(self)

    def _go(self, state: GroupState) -> None:
        self._queued.end()
        self.state = moved(self.state, state)
