"""The stream of a group in parts: the deltas of all parts as they come.

Who frees what: from the moment prefill grants the ticket until every part has brought its first delta, the ticket is
this stream's, and then, or when the group ends before, it is given back; for a part that moved has not read it, and a
lease waits for all its readers. Giving back what all have read changes nothing, and no reader waits for it.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from motet.engines.base import Engine, GroupStream
from motet.errors import EngineClosedError
from motet.ids import ModelName, RequestId
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta


class Tickets(Protocol):
    """Prefill, as whoever splits a group asks for it."""

    def asks_prefill(self, request: GenerateRequest) -> bool:
        """Whether this group is for prefill first."""
        ...

    def ticket_readers(self, model: ModelName) -> int:
        """How many readers a ticket may have."""
        ...

    async def ticket(self, request: GenerateRequest, *, readers: int = 1) -> Ticket | None:
        """For as many readers, or fewer if its maker allows no more. None: decode is to do without. Raises what ends
        the group."""
        ...

    def reads(self, ticket: Ticket, model: ModelName) -> bool:
        """Whether a decode worker is up that can fetch what the ticket is for."""
        ...

    async def release(self, ticket: Ticket) -> None: ...


class SpreadGroup:
    """A `GroupStream`. `ended` is called once, when nothing of the group is left."""

    def __init__(
        self,
        request: GenerateRequest,
        plan: Sequence[int],
        engine: Engine,
        tickets: Tickets,
        *,
        apart: bool,
        ended: Callable[["SpreadGroup"], None],
    ) -> None:
        """`plan`: choices of each part. `apart`: whether the prompt is prefilled first."""
        self.request = request
        self._plan = plan
        self._engine = engine
        self._tickets = tickets
        self._ended = ended
        self._choices = request.choices
        self._parts: list[GenerateRequest] | None = None
        self._streams: list[GroupStream] = []
        self._unread: Ticket | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._not_begun = 0
        self._prompt_told = False
        self._error: Exception | None = None
        """What it ended with."""
        # Two deltas of each part at most: a slow reader holds the parts back rather than filling memory.
        self._queue: asyncio.Queue[GroupDelta | Exception | None] = asyncio.Queue(maxsize=2 * len(plan))
        self._running = asyncio.create_task(self._run(apart=apart))
        self._ending: asyncio.Task[None] | None = None

    @property
    def choices_on_the_way(self) -> int:
        """Not given to decode yet."""
        return len(self._choices) if self._parts is None else 0

    def __aiter__(self) -> "SpreadGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        item = None if self._ending is not None else await self._queue.get()
        if isinstance(item, GroupDelta):
            return self._given(item)
        self._error = self._error or item
        await self.aclose()
        raise self._error or StopAsyncIteration

    async def aclose(self) -> None:
        if self._ending is None:
            self._running.cancel()
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def stop(self, index: int) -> None:
        """Before decode has the group: the choice is left out of it."""
        if self._parts is None:
            self._choices = tuple(start for start in self._choices if start.index != index)
            if not self._choices:
                await self.aclose()
            return
        for part in self._parts:
            if any(start.index == index for start in part.choices):
                await self._engine.stop_choice(part.request_id, index)

    async def wait_no_more(self) -> None:
        """The server is closing."""
        if self._parts is None:
            self._running.cancel()
            await asyncio.wait((self._running,))
            if self._queue.empty():
                self._queue.put_nowait(EngineClosedError("the engine was closed"))

    async def _run(self, *, apart: bool) -> None:
        """Ends with an error or a None in the queue."""
        try:
            if apart:
                self._unread = await self._tickets.ticket(self.request, readers=len(self._plan))
            # Without the ticket it was planned for, every part would compute the prompt: then one does.
            readers = self._unread.readers if self._unread else 0
            plan = self._plan if readers >= len(self._plan) or not apart else [len(self._choices)]
            self._parts = list(self._split(plan))
            self._not_begun = len(self._parts)
            for part in self._parts:
                self._streams.append(self._engine.generate(self._with_what_is_read(part)))
            async with asyncio.TaskGroup() as pumps:
                for stream in self._streams:
                    pumps.create_task(self._pump(stream))
        except* Exception as errors:  # handed to the reader, who raises it
            await self._over(_first(errors))
        else:
            await self._over(None)

    async def _over(self, error: Exception | None) -> None:
        """Not told where the group is being ended: nobody makes room in the queue any more, and that this task was
        cancelled is lost if a part failed in the same turn."""
        if self._ending is None:
            await self._queue.put(error)

    def _split(self, plan: Sequence[int]) -> Iterator[GenerateRequest]:
        left = iter(self._choices)
        for number, size in enumerate(plan):
            if choices := tuple(islice(left, size)):
                yield msgspec.structs.replace(
                    self.request,
                    request_id=RequestId(f"{self.request.request_id}/{number}"),
                    choices=choices,
                    ticket=self._unread,
                    straight=True,
                )

    def _with_what_is_read(self, part: GenerateRequest) -> GenerateRequest:
        """Without a ticket that nobody can read any more; it is given back with those of the other parts."""
        if part.ticket is None or self._tickets.reads(part.ticket, part.model):
            return part
        return msgspec.structs.replace(part, ticket=None)

    async def _pump(self, stream: GroupStream) -> None:
        begun = False
        async for delta in stream:
            if not begun:
                begun = True
                self._needs_ticket_no_more()
            await self._queue.put(delta)
        if not begun:  # all its choices were stopped
            self._needs_ticket_no_more()

    def _needs_ticket_no_more(self) -> None:
        """One part more has read it, moved or ended."""
        self._not_begun -= 1
        if not self._not_begun:
            self._give_back()

    def _given(self, delta: GroupDelta) -> GroupDelta:
        prompt = None if self._prompt_told else delta.prompt
        self._prompt_told = self._prompt_told or prompt is not None
        return GroupDelta(self.request.request_id, delta.choices, prompt)

    def _give_back(self) -> None:
        if self._unread is not None and self._releasing is None:
            self._releasing = asyncio.create_task(self._tickets.release(self._unread))

    async def _end(self) -> None:
        try:
            await asyncio.wait((self._running,))
            await asyncio.gather(*(stream.aclose() for stream in self._streams))
            self._give_back()
            if self._releasing is not None:
                await self._releasing
        finally:
            if self._queue.empty():
                self._queue.put_nowait(None)  # whoever still waits for a delta
            self._ended(self)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("a group of no errors")
