"""The choices of a group that start at different times, or whose steps depend on numbers of tokens alone.

    SteeredStream    one stream for the reader, over several groups of the engine:

        ChoiceBatch  "g"      choices 0..start-1, with the ticket
        ChoiceBatch  "g+1"    choices that start later. They join the trunk, or find the prompt in the prefix cache
        ...

Each engine group is placed, moved and freed separately, and the end of the stream ends all of them. They share one
session, so that choices that start later are placed on the worker that has the prompt. Their request has been admitted:
if the engine has no capacity for later choices, or no worker is available, they are submitted again while the other
choices continue.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from motet.engine import Engine, GroupStream
from motet.errors import NoWorkerError, OverloadedError
from motet.ids import RequestId
from motet.merge import Merge, PromptOnce, Take
from motet.policies.lockstep import Lockstep
from motet.types import GenerateRequest, GroupDelta

HELD_DELTAS = 64
"""Number of unread deltas above which the engine's streams wait for the reader."""
RETRY_S = 0.25
"""Time in seconds after which refused choices are submitted again."""
NO_WORKER_S = 60.0
"""Maximum time in seconds without any worker before choices that have to start fail."""


class ChoiceBatch:
    """Choices that start together: one group of the engine."""

    def __init__(self, engine: Engine, request: GenerateRequest, *, later: bool) -> None:
        """Submits the group at once, unless it starts `later`. Raises the errors of `Engine.generate`."""
        self._engine = engine
        self._request = request
        self._stream: GroupStream | None = None if later else engine.generate(request)

    async def stop(self, index: int) -> None:
        """Ends a choice. If the engine has not accepted it yet, it never starts."""
        choices = tuple(start for start in self._request.choices if start.index != index)
        self._request = msgspec.structs.replace(self._request, choices=choices)
        if self._stream is not None:
            await self._engine.stop_choice(self._request.request_id, index)

    async def aclose(self) -> None:
        """Frees the group in the engine. Must not be called while `run` runs."""
        if self._stream is not None:
            await self._stream.aclose()

    async def run(self, take: Take[GroupDelta]) -> None:
        """Delivers the deltas of the group. A group that starts later is submitted first, and again after each refusal
        until the engine has sent a delta."""
        started, last_worker_s = self._stream is not None, time.monotonic()
        while self._stream is not None or self._request.choices:
            try:
                if self._stream is None:
                    self._stream = self._engine.generate(self._request)
                async for delta in self._stream:
                    started = True
                    if (taking := take((delta,))) is not None:
                        await taking
                return
            except (OverloadedError, NoWorkerError) as error:
                without_worker = isinstance(error, NoWorkerError)
                if started or (without_worker and time.monotonic() - last_worker_s > NO_WORKER_S):
                    raise
                last_worker_s = last_worker_s if without_worker else time.monotonic()
                await self.aclose()
                self._stream = None
                await asyncio.sleep(RETRY_S)


class SteeredStream(AsyncIterator[GroupDelta]):
    """A `GroupStream` that can be read again after its end if more choices have started."""

    def __init__(
        self,
        engine: Engine,
        request: GenerateRequest,
        *,
        first: int,
        lockstep: bool,
        count_waiting_bytes: Callable[[int], None],
    ) -> None:
        """Submits the first `first` choices at once. Raises the errors of `Engine.generate`. `count_waiting_bytes`:
        called with the memory of the tokens that wait for slower choices. The reader of the stream gets its errors."""
        self._engine = engine
        self._request = request
        self._waiting = deque(request.choices)
        self._batches: list[ChoiceBatch] = []
        self._batch_of: dict[int, ChoiceBatch] = {}
        """Batch of each choice that has started, by index."""
        self._deltas = Merge[GroupDelta](HELD_DELTAS)
        self._lockstep = Lockstep(request.request_id) if lockstep else None
        self._count_waiting_bytes = count_waiting_bytes
        self._prompt = PromptOnce()
        self._closing: asyncio.Task[None] | None = None
        self.start(first)

    def start(self, count: int) -> None:
        """Starts the next `count` choices."""
        starts = tuple(self._waiting.popleft() for _ in range(count))
        request, number = self._request, len(self._batches)
        name, ticket, sampling = request.request_id, request.ticket, request.sampling
        if number:
            name, ticket = RequestId(f"{name}+{number}"), None
            if sampling.prompt_logprobs is not None:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        session = request.session_id or request.request_id
        group = msgspec.structs.replace(
            request, request_id=name, choices=starts, ticket=ticket, sampling=sampling, session_id=session
        )
        batch = ChoiceBatch(self._engine, group, later=number > 0)
        self._batches.append(batch)
        self._deltas.add(batch.run)
        indices = [start.index for start in starts]
        self._batch_of |= dict.fromkeys(indices, batch)
        if self._lockstep is not None:
            self._lockstep.start(indices)

    def withdraw(self, index: int) -> None:
        """Removes a choice that has not started."""
        self._waiting = deque(start for start in self._waiting if start.index != index)

    async def stop(self, index: int) -> None:
        """Ends a choice that has started."""
        if self._lockstep is not None:
            self._lockstep.end(index)
        await self._batch_of[index].stop(index)

    def __aiter__(self) -> AsyncIterator[GroupDelta]:
        return self

    async def __anext__(self) -> GroupDelta:
        while True:
            if self._lockstep is not None:
                if (step := self._lockstep.next()) is not None:
                    return step
                self._count_waiting_bytes(self._lockstep.waiting_bytes)
            delta = await anext(self._deltas)
            if delta.prompt is not None:
                delta = msgspec.structs.replace(delta, prompt=self._prompt.first(delta.prompt))
            if self._lockstep is None:
                return delta
            self._lockstep.feed(delta)

    async def aclose(self) -> None:
        """Ends all groups of the engine, even if the caller is cancelled. Can be called at any time and repeatedly."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._deltas.aclose()
        await asyncio.gather(*(batch.aclose() for batch in self._batches))
