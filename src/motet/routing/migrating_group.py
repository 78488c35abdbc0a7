"""The stream of a group that moves from worker to worker: one stream after the other, as one."""

import asyncio
import logging
from collections.abc import Callable

from motet.engines.base import Engine, GroupStream, NoGroup
from motet.errors import EngineClosedError, MotetError
from motet.ids import ModelName
from motet.routing.moves import Cause, Moves, Outcome, cause_of
from motet.routing.unfinished import Unfinished
from motet.types import GenerateRequest, GroupDelta

logger = logging.getLogger(__name__)


class MigratingGroup:
    """A `GroupStream`. Moving is done by whoever reads it; `ended` is called once, when nothing more comes."""

    def __init__(  # sizes: the group, where it goes, and what it is told by
        self,
        request: GenerateRequest,
        engine: Engine,
        moves: Moves,
        *,
        changed: Callable[[], asyncio.Future[None]],
        hopeful: Callable[[ModelName], bool],
        ended: Callable[["MigratingGroup"], None],
    ) -> None:
        self.request = request
        self._engine = engine
        self._moves = moves
        self._changed = changed
        self._hopeful = hopeful
        self._ended = ended
        self._left = Unfinished(request)
        self._lives = 0
        """How often the group has been submitted again."""
        self._current = request
        """What the present stream was made of."""
        self._lost: MotetError | None = None
        """What the present stream ended with, if the group is to go on elsewhere."""
        self._over = False
        self._error: MotetError | None = None
        """What it was over with."""
        self._closed = False
        self._abandoned = False
        self._woken = asyncio.Event()
        """Ends a wait for a worker."""
        self._stream: GroupStream = self._first_stream()

    def __aiter__(self) -> "MigratingGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._over:
            raise self._error or StopAsyncIteration
        try:
            while True:
                if self._lost is not None:
                    await self._move(self._lost)
                try:
                    delta = await self._stream.__anext__()
                except MotetError as error:
                    self._begin(error)
                    self._lost = error
                else:
                    return self._given(delta)
        except (MotetError, StopAsyncIteration) as end:
            self._error = end if isinstance(end, MotetError) else None
            self._end()
            raise

    async def aclose(self) -> None:
        self._closed = True
        self._woken.set()
        self._end()
        await self._stream.aclose()

    async def stop(self, index: int) -> None:
        """A choice that waits for a worker needs none any more."""
        self._left.drop(index)
        if not self._left:
            self._woken.set()
        await self._engine.stop_choice(self._current.request_id, index)

    def wait_no_more(self) -> None:
        """The server is closing."""
        self._abandoned = True
        self._woken.set()

    def _first_stream(self) -> GroupStream:
        """A new group is refused at once; for a part of one that was let in before, another worker may come."""
        try:
            return self._engine.generate(self.request)
        except MotetError as error:
            if not self.request.straight:
                raise
            return NoGroup(error)

    def _given(self, delta: GroupDelta) -> GroupDelta:
        if self._lives:
            self._moves.resumed(self._left)
            delta = GroupDelta(self.request.request_id, delta.choices, None if self._left.prompt_told else delta.prompt)
        self._left.take(delta)
        return delta

    async def _move(self, error: MotetError) -> None:
        """Returns with a new stream. Raises `error`, or the end, where none is to come. If its reader is cancelled
        meanwhile, the next one takes it up."""
        await self._stream.aclose()
        latest = error
        while self._lost is not None:
            patience_s = self._moves.patience_s(self._cause(latest), hopeful=self._hopeful(self.request.model))
            if patience_s is None:
                raise error
            await self._wait(patience_s)
            cause = self._cause(latest)
            try:
                self._submit(cause)
            except MotetError as again:
                self._begin(again)
                latest = again
            else:
                self._lost = None

    def _begin(self, error: MotetError) -> None:
        """Raises `error`, or the end, where the group is not to go on."""
        self._moves.begin(self._cause(error), error, begun=self._left.begun)

    def _cause(self, error: MotetError) -> Cause:
        if self._closed or not self._left:
            raise StopAsyncIteration
        if self._abandoned:
            raise EngineClosedError("the server is closing")
        cause = cause_of(error)
        if cause is None:
            if not isinstance(error, EngineClosedError):
                self._moves.end(Outcome.FAILED)
            raise error
        return cause

    def _submit(self, cause: Cause) -> None:
        rest = self._left.rest(self._lives + 1)
        self._stream = self._engine.generate(rest)
        self._current = rest
        self._lives += 1
        fields = {
            "request_id": self.request.trace,
            "group": self.request.request_id,
            "cause": cause.value,
            "choices": self._left.choices,
            "written_tokens": self._left.tokens,
        }
        logger.warning("a group goes on elsewhere", extra={"fields": fields})

    async def _wait(self, patience_s: float) -> None:
        """For something to change, or the end."""
        if patience_s <= 0:
            return
        waits = self._changed(), asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._moves.end(Outcome.CLOSED)
            self._ended(self)
