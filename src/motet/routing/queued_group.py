"""The stream of a group that waits for room before it is given to anybody."""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from motet.engines.base import Engine, GroupStream
from motet.errors import MotetError
from motet.routing.room import Look
from motet.types import GenerateRequest, GroupDelta


class QueuedGroup:
    """A `GroupStream`. `start` or `fail` ends its wait; `ended` is called once, when nothing more comes."""

    def __init__(
        self,
        request: GenerateRequest,
        engine: Engine,
        *,
        now_s: float,
        ended: Callable[["QueuedGroup"], None],
    ) -> None:
        self.request = request
        self.since_s = now_s
        self._engine = engine
        self._ended = ended
        self._stream: GroupStream | None = None
        self._error: Exception | None = None
        self._over = False
        self._turn = asyncio.Event()

    def fits(self, looks: Mapping[str, Look]) -> bool:
        """`looks`: one for each model."""
        return looks[self.request.model].fits(len(self.request.choices), len(self.request.prompt))

    def start(self) -> None:
        """It has room."""
        try:
            self._stream = self._engine.generate(self.request)
        except Exception as error:  # the reader's, and not of who lets groups in
            self._error = error
        self._turn.set()

    def fail(self, error: MotetError) -> None:
        """It waits no more; its reader gets `error`, unless it has started."""
        self._error = self._error or error
        self._turn.set()

    def __aiter__(self) -> "QueuedGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._stream is None:
            await self._turn.wait()
            if self._stream is None:
                self._end()
                raise self._error or StopAsyncIteration
        try:
            return await self._stream.__anext__()
        except (StopAsyncIteration, MotetError):
            self._end()
            raise

    async def aclose(self) -> None:
        self._end()
        self._turn.set()
        if self._stream is not None:
            await self._stream.aclose()

    async def stop(self, index: int) -> None:
        """While it waits, the choice is left out of it."""
        if self._stream is not None:
            await self._engine.stop_choice(self.request.request_id, index)
            return
        choices = tuple(start for start in self.request.choices if start.index != index)
        if choices:
            self.request = msgspec.structs.replace(self.request, choices=choices)
        else:
            await self.aclose()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._ended(self)
