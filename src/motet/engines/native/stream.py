"""The deltas of one group, between the pipe that brings them and whoever reads them."""

import asyncio
from collections import deque
from collections.abc import Callable

from motet.errors import MotetError
from motet.ids import RequestId
from motet.types import GenerateRequest, GroupDelta


class PipeStream:
    """A `GroupStream` fed from outside. What a slow reader leaves here is bounded by the answers themselves: at most
    `max_tokens` a choice."""

    def __init__(self, request: GenerateRequest, abort: Callable[[RequestId], None]) -> None:
        self._request_id = request.request_id
        self._abort = abort
        self._open = {start.index for start in request.choices}
        self._deltas: deque[GroupDelta] = deque()
        self._error: MotetError | None = None
        self._reader: asyncio.Future[None] | None = None
        """Who waits for the next delta. An `asyncio.Event` would do, at a third more for each step of a group."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will be fed."""
        return not self._open or self._error is not None

    def feed(self, delta: GroupDelta) -> None:
        self._deltas.append(delta)
        for choice in delta.choices:
            if choice.finish is not None:
                self._open.discard(choice.index)
        self._wake()

    def fail(self, error: MotetError) -> None:
        """Ends the stream with `error`, behind what was fed before."""
        self._error = error
        self._wake()

    def choice_ended(self, index: int) -> None:
        """The reader ended this choice itself."""
        self._open.discard(index)
        self._wake()

    def __aiter__(self) -> "PipeStream":
        return self

    async def __anext__(self) -> GroupDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._deltas.popleft()

    async def aclose(self) -> None:
        self._deltas.clear()
        self._open.clear()
        self._abort(self._request_id)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
