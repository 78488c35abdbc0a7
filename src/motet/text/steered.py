"""The choices of a group that does not begin with all of them, or whose steps depend on numbers of tokens alone.

    SteeredStream    one stream for the reader, over the engine's groups of it:

        EngineGroup  "g"      choices 0..start-1, with the ticket
        EngineGroup  "g+1"    choices that begin later. They join the trunk, or find the prompt in the prefix cache
        ...

Each engine group is placed, moved and freed by itself; whatever ends the stream ends them all. They are one session, so
that those that begin later go where the prompt is. Their request was let in long ago: when there is no room for them,
or no worker at the moment, they ask again, and the others go on.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from motet.engine import Engine, GroupStream
from motet.errors import NoWorkerError, OverloadedError
from motet.ids import RequestId
from motet.policies.lockstep import Lockstep
from motet.types import GenerateRequest, GroupDelta

HELD_DELTAS = 64
"""Deltas that may wait for the reader: a slow one holds the engine's streams back."""
ASK_AGAIN_S = 0.25
"""Seconds after which choices that could not begin ask again."""
NO_WORKER_S = 60.0
"""Seconds for which they ask while there is no worker at all."""

Deltas = asyncio.Queue[GroupDelta | Exception | None]
"""What engine groups bring; None: one is over."""


class ChoiceBatch:
    """Choices that begin together. A task of its own reads them."""

    def __init__(self, engine: Engine, request: GenerateRequest, *, deltas: Deltas, later: bool) -> None:
        """Submits the group at once, unless it begins `later`. Raises what `Engine.generate` raises."""
        self._engine = engine
        self._request = request
        self._deltas = deltas
        self._stream: GroupStream | None = None if later else engine.generate(request)
        self._reading = asyncio.create_task(self._read(later))

    async def stop(self, index: int) -> None:
        """Ends a choice; one that could not begin yet never does."""
        request = self._request
        if self._stream is not None:
            await self._engine.stop_choice(request.request_id, index)
            return
        choices = tuple(start for start in request.choices if start.index != index)
        self._request = msgspec.structs.replace(request, choices=choices)

    async def aclose(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        if self._stream is not None:
            await self._stream.aclose()

    async def _read(self, later: bool) -> None:
        try:
            if later:
                await self._read_patiently()
            elif self._stream is not None:
                async for delta in self._stream:
                    await self._deltas.put(delta)
            await self._deltas.put(None)
        except Exception as error:  # the reader raises it
            await self._deltas.put(error)

    async def _read_patiently(self) -> None:
        """Submits the group and reads it; again after a refusal, until it has shown something."""
        begun, without_worker_s = False, time.monotonic()
        while self._request.choices:
            try:
                self._stream = self._engine.generate(self._request)
                async for delta in self._stream:
                    begun = True
                    await self._deltas.put(delta)
                return
            except (OverloadedError, NoWorkerError) as error:
                lost = isinstance(error, NoWorkerError)
                if begun or (lost and time.monotonic() - without_worker_s > NO_WORKER_S):
                    raise
                without_worker_s = without_worker_s if lost else time.monotonic()
                if self._stream is not None:
                    await self._stream.aclose()
                    self._stream = None
                await asyncio.sleep(ASK_AGAIN_S)


class SteeredStream(AsyncIterator[GroupDelta]):
    """A `GroupStream`, which may be read on after its end if more choices have begun."""

    def __init__(self, engine: Engine, request: GenerateRequest, *, start: int, lockstep: bool) -> None:
        """Submits the first `start` choices at once. Raises what `Engine.generate` raises."""
        self._engine = engine
        self._request = request
        self._waiting = deque(request.choices)
        self._groups: list[ChoiceBatch] = []
        self._group_of: dict[int, ChoiceBatch] = {}
        """The group of each choice that has begun."""
        self._deltas: Deltas = asyncio.Queue(HELD_DELTAS)
        self._reading = 0
        """Number of groups whose end has not been read."""
        self._lockstep = Lockstep(request.request_id) if lockstep else None
        self._prompt_told = False
        self._ending: asyncio.Task[None] | None = None
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
        asked = msgspec.structs.replace(
            request, request_id=name, choices=starts, ticket=ticket, sampling=sampling, session_id=session
        )
        group = ChoiceBatch(self._engine, asked, deltas=self._deltas, later=number > 0)
        self._groups.append(group)
        self._reading += 1
        indices = [start.index for start in starts]
        self._group_of |= dict.fromkeys(indices, group)
        if self._lockstep is not None:
            self._lockstep.begin(indices)

    def withdraw(self, index: int) -> None:
        """Takes out a choice that waits."""
        self._waiting = deque(start for start in self._waiting if start.index != index)

    async def stop(self, index: int) -> None:
        """Ends a choice that has begun."""
        if self._lockstep is not None:
            self._lockstep.end(index)
        await self._group_of[index].stop(index)

    def __aiter__(self) -> AsyncIterator[GroupDelta]:
        return self

    async def __anext__(self) -> GroupDelta:
        while True:
            if self._lockstep is not None and (step := self._lockstep.next()) is not None:
                return step
            if self._reading == 0 or self._ending is not None:
                raise StopAsyncIteration
            item = await self._deltas.get()
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
        """Ends all engine groups, also if the caller is cancelled meanwhile. May be called at any time, twice too."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        await asyncio.gather(*(group.aclose() for group in self._groups))
        if self._deltas.empty():
            self._deltas.put_nowait(None)  # for a reader that waits
