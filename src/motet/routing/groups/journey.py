"""The life of a group in the router: one object, from the arrival of the group until nothing of it is left.

    QUEUED ──► PREFILLING ──► GENERATING ⇄ MOVING ──► OVER          any state can end in OVER

1. QUEUED       no worker has the capacity. `start` ends the wait; with capacity, it is called at once
2. PREFILLING   a prefill worker computes the prompt, once for all parts (`GroupPrefill`)
3. GENERATING   the choices of each part are on one worker (`GroupParts`); the reader of the journey reads its stream
4. MOVING       a state of a part only: its worker was lost, and its unfinished choices continue on another worker, with
                another prefill if that pays. The reader sees a pause (`PartMover`)
5. OVER         all choices have ended, or an error ended them, or the reader left

Who frees what: `GroupPrefill` owns a ticket until the parts take it, and `HeldTicket` until every part has read it;
`Placement` removes its choices from the load of its worker when it ends; the tasks that wait for prefill or for a
worker end with the journey.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from motet.errors import MotetError
from motet.routing.groups.dispatch import Dispatcher
from motet.routing.groups.migration import GroupState, Moves, transition
from motet.routing.groups.part import GroupParts
from motet.routing.groups.prefiller import GroupPrefill
from motet.routing.groups.unfinished import Unfinished
from motet.types import GenerateRequest, GroupDelta


class Journey:
    """A `GroupStream`. `on_over` is called once, when nothing of the group is left."""

    def __init__(
        self,
        request: GenerateRequest,
        dispatcher: Dispatcher,
        *,
        moves: Callable[[], Moves],
        now_s: float,
        on_over: Callable[["Journey"], None],
    ) -> None:
        """`moves`: makes the `Moves` of each part. `now_s`: time at which the group arrived."""
        self.arrival_s = now_s
        self.state = GroupState.QUEUED
        self._dispatcher = dispatcher
        self._on_over = on_over
        self._unfinished = Unfinished(request)
        """The choices that have not been stopped. After `_place`, the parts own them."""
        self._prefill = GroupPrefill(self._unfinished, dispatcher.prefiller, releases=dispatcher.releases)
        self._parts = GroupParts(dispatcher, moves=moves)
        self._ready = asyncio.Event()
        """Set when the parts have a stream, or when the group has ended without parts."""
        self._error: Exception | None = None
        """The error that ended the group before it had parts."""
        self._aborted = False
        """True if the group was aborted before it had parts."""
        self._ending: asyncio.Task[None] | None = None
        self._queue_span = dispatcher.tracer.of(request.traceparent).child("queue")

    @property
    def request(self) -> GenerateRequest:
        return self._unfinished.request

    @property
    def num_choices(self) -> int:
        """Number of choices that the group will generate. Valid only while it waits."""
        return len(self._unfinished)

    @property
    def waits(self) -> bool:
        return self.state is GroupState.QUEUED

    @property
    def ending(self) -> bool:
        """True once `aclose` has been called."""
        return self._ending is not None

    def start(self, *, queue_s: float = 0.0) -> None:
        """Gives the group to workers. `queue_s`: time for which it has waited for capacity. Raises an error if it is
        refused before anything runs; then the group is over."""
        self._unfinished.prompt.queue_s = queue_s
        try:
            prefilled = self._prefill.pays()
            request = self.request if self.request.ticket is not None else self._unfinished.remaining_request(0)
            sizes = self._dispatcher.part_sizes(request, prefilled=prefilled)
            if prefilled:
                self._go(GroupState.PREFILLING)
                self._prefill.start(sizes, place=self._place, fail=self.fail)
            else:
                self._place(sizes, may_wait=len(sizes) > 1)
        except BaseException:
            self._go(GroupState.OVER)
            raise

    def fail(self, error: Exception) -> None:
        """Ends a group that waits for capacity or for prefill. Its reader gets `error`."""
        self._error = self._error or error
        self._prefill.cancel()
        self._ready.set()

    async def abandon(self, error: MotetError) -> None:
        """Ends all waiting, because the server is closing. Choices that are on a worker end with their engine."""
        if self._parts.stream is None:
            self.fail(error)
            await self.aclose()
        self._parts.abandon()

    async def abort(self) -> None:
        """Ends all choices early. The reader gets the tokens generated so far, and the end of each choice."""
        if self._parts.stream is None:
            self._aborted = True
            await self.aclose()
        await self._parts.abort()

    def __aiter__(self) -> AsyncIterator[GroupDelta]:
        return self._parts.stream or self  # saves a stack frame for each token

    async def __anext__(self) -> GroupDelta:
        await self._ready.wait()
        if self._parts.stream is not None:
            return await anext(self._parts.stream)
        await self.aclose()
        if self._aborted and (last := self._unfinished.abort()) is not None:
            return last
        raise self._error or StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the group, even if the caller is cancelled before this returns."""
        if self._ending is None:
            self._prefill.cancel()
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def stop(self, index: int) -> None:
        """Ends one choice early. Before the group has parts, the choice is removed from it."""
        if self._parts.stream is not None:
            await self._parts.stop(index)
            return
        self._unfinished.choices.pop(index, None)
        if not self._unfinished:
            await self.aclose()

    def _place(self, sizes: list[int], *, may_wait: bool = True) -> None:
        """Gives every part to a worker. `may_wait`: see `Part.start`."""
        self._go(GroupState.GENERATING)
        held = self._prefill.take()
        self._parts.place(self._unfinished, sizes, held=held, may_wait=may_wait, on_end=self.aclose)
        self._ready.set()

    async def _end(self) -> None:
        try:
            await self._prefill.close()
            await self._parts.aclose()
        finally:
            self._go(GroupState.OVER)
            self._ready.set()
            self._on_over(self)

    def _go(self, state: GroupState) -> None:
        self._queue_span.end()
        self.state = transition(self.state, state)
