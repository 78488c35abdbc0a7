"""The stream of one group that runs on another server: its connection is the group.

1. the request goes out at once, in a task of its own
2. who iterates reads the connection; a slow reader holds it back by TCP, and nobody else
3. closing the connection frees the group there; whatever ends the group here closes it
"""

import asyncio
from collections import deque
from collections.abc import Callable

import aiohttp
import msgspec

from motet.engines.calls import FAULTS
from motet.engines.remote.server import EngineServer
from motet.engines.wire import CarriedError, FrameReader
from motet.errors import (
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    NoWorkerError,
    WorkerLeavingError,
)
from motet.types import GenerateRequest, GroupDelta


class RemoteGroup:
    """A `GroupStream`. `over` is called once, when the group has no more use for its connection."""

    def __init__(self, server: EngineServer, request: GenerateRequest, over: Callable[["RemoteGroup"], None]) -> None:
        self.request = request
        self._server = server
        self._over = over
        self._unfinished = {start.index for start in request.choices}
        self._frames = FrameReader()
        self._deltas: deque[GroupDelta] = deque()
        self._error: MotetError | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._released = False
        self._opening = asyncio.create_task(self._open())

    @property
    def withdrawn(self) -> bool:
        """Whether its reader closed it before the server said that it has the group, or why not."""
        return self._released and self._response is None and self._error is None

    @property
    def released(self) -> bool:
        """Whether it has given up its connection."""
        return self._released

    async def settled(self) -> None:
        """Returns when the server has the group, or never will: then no task of it is left."""
        await asyncio.wait([self._opening])

    def __aiter__(self) -> "RemoteGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            await self._read()
        return self._deltas.popleft()

    async def aclose(self) -> None:
        self._deltas.clear()
        self._unfinished.clear()
        self._release()
        await self.settled()

    def fail(self, error: MotetError) -> None:
        """Ends the group with `error`, behind what has been read before."""
        if self._error is None:
            self._error = error
        self._release()

    def choice_ended(self, index: int) -> None:
        """The reader ended this choice itself."""
        self._unfinished.discard(index)
        if not self._unfinished:
            self._release()

    async def _open(self) -> None:
        try:
            body = msgspec.msgpack.encode(self.request)
            self._response = await self._server.open("/engine/generate", body, trace=self.request.trace)
        except MotetError as error:
            self.fail(error)

    async def _read(self) -> None:
        """What the connection has, at least something of it."""
        if self._response is None:
            await self.settled()
            if self._response is None and self._unfinished and self._error is None:
                self._opening.result()  # what it failed with is no error of ours
            return
        try:
            data = await self._response.content.readany()
            frames = self._frames.feed(data)
        except FAULTS as error:
            if self._unfinished:
                self.fail(EngineDiedError(f"{self._server.name} was lost in mid-answer: {_said(error)}"))
            return
        except EngineError as error:
            self.fail(EngineError(f"{self._server.name}: {error.message}"))
            return
        for content in frames:
            self._take(content)
        if not data and self._unfinished:
            self.fail(EngineDiedError(f"{self._server.name} broke off before choices {sorted(self._unfinished)} ended"))

    def _take(self, content: GroupDelta | CarriedError) -> None:
        if isinstance(content, CarriedError):
            self.fail(_as_seen_from_here(content.error()))
            return
        self._deltas.append(content)
        for choice in content.choices:
            if choice.finish is not None:
                self._unfinished.discard(choice.index)
        if not self._unfinished:
            self._release()

    def _release(self) -> None:
        """Closes the connection; one whose answer was read to its end has gone back to the client already."""
        if self._released:
            return
        self._released = True
        if self._response is None:
            self._opening.cancel()
        else:
            self._response.close()
        self._over(self)


def _as_seen_from_here(error: MotetError) -> MotetError:
    """A worker that closes or drains takes part no more, while we go on: so may the group, elsewhere."""
    if isinstance(error, EngineClosedError | DrainingError):
        return WorkerLeavingError(error.message)
    if isinstance(error, NoWorkerError):  # it has none: of ours it says nothing
        return EngineDiedError(error.message)
    return error


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
