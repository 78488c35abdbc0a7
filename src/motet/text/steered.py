"""The choices of a group that does not begin with all of them, or whose steps depend on numbers of tokens alone.

    SteeredStream    one stream for the reader, over the engine's groups of it:

        group  "g"       choices 0..start-1, with the ticket
        group  "g+1"     choices that begin later. They join the trunk, or find the prompt's blocks in the prefix cache
        ...

Each engine group is placed, moved and freed by itself; whatever ends the stream ends them all. They are one session, so
that those that begin later go where the prompt is.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from motet.engines.base import Engine, GroupStream
from motet.ids import RequestId
from motet.policies.lockstep import Lockstep
from motet.types import GenerateRequest, GroupDelta

HELD_DELTAS = 64
"""Deltas that may wait for the reader: a slow one holds the engine's streams back."""


class SteeredStream(AsyncIterator[GroupDelta]):
    """A `GroupStream`."""

    def __init__(self, engine: Engine, request: GenerateRequest, *, start: int, lockstep: bool) -> None:
        """Submits the first `start` choices at once. Raises what `Engine.generate` raises."""
        self._engine = engine
        self._request = request
        self._waiting = deque(request.choices)
        self._groups: list[tuple[GroupStream, asyncio.Task[None]]] = []
        self._group_of: dict[int, RequestId] = {}
        """The engine's group of each choice that has begun."""
        self._queue: asyncio.Queue[GroupDelta | Exception | None] = asyncio.Queue(HELD_DELTAS)
        self._reading = 0
        """Number of engine groups whose end has not been read."""
        self._lockstep = Lockstep(request.request_id) if lockstep else None
        self._prompt_told = False
        self._closed = False
        self.begin(start)

    def begin(self, count: int) -> None:
        """Lets the next `count` choices begin."""
        starts = tuple(self._waiting.popleft() for _ in range(count))
        request, number = self._request, len(self._groups)
        name, ticket, sampling = request.request_id, request.ticket, request.sampling
        if number:
            name, ticket = RequestId(f"{name}+{number}"), None
            if sampling.prompt_logprobs is not None:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        session = request.session_id or request.request_id
        stream = self._engine.generate(
            msgspec.structs.replace(
                request, request_id=name, choices=starts, ticket=ticket, sampling=sampling, session_id=session
            )
        )
        self._groups.append((stream, asyncio.create_task(self._pump(stream))))
        self._reading += 1
        indices = [start.index for start in starts]
        self._group_of |= dict.fromkeys(indices, name)
        if self._lockstep is not None:
            self._lockstep.begin(indices)

    def withdraw(self, index: int) -> None:
        """Takes out a choice that waits."""
        self._waiting = deque(start for start in self._waiting if start.index != index)

    async def stop(self, index: int) -> None:
        """Ends a choice that has begun."""
        if self._lockstep is not None:
            self._lockstep.end(index)
        await self._engine.stop_choice(self._group_of[index], index)

    def __aiter__(self) -> AsyncIterator[GroupDelta]:
        return self

    async def __anext__(self) -> GroupDelta:
        while True:
            if self._lockstep is not None and (step := self._lockstep.next()) is not None:
                return step
            if self._reading == 0 or self._closed:
                raise StopAsyncIteration
            item = await self._queue.get()
            if item is None:
                self._reading -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                delta = self._once_told(item)
                if self._lockstep is None:
                    return delta
                self._lockstep.feed(delta)

    def _once_told(self, delta: GroupDelta) -> GroupDelta:
        """Returns the delta, with the report on the prompt only if it is the first one."""
        if delta.prompt is None:
            return delta
        told, self._prompt_told = self._prompt_told, True
        return msgspec.structs.replace(delta, prompt=None) if told else delta

    async def aclose(self) -> None:
        """Ends all engine groups. May be called at any time, twice too."""
        self._closed = True
        groups, self._groups = self._groups, []
        for _, pump in groups:
            pump.cancel()
        if groups:
            await asyncio.wait([pump for _, pump in groups])
            await asyncio.gather(*(stream.aclose() for stream, _ in groups))
        if self._queue.empty():
            self._queue.put_nowait(None)  # for a reader that waits

    async def _pump(self, stream: GroupStream) -> None:
        try:
            async for delta in stream:
                await self._queue.put(delta)
            await self._queue.put(None)
        except Exception as error:  # the reader raises it
            await self._queue.put(error)
