"""A group on one server: one request where n is honoured, else one a choice, so many at once; read as one stream.

    requests ──► a task each, `max_singles` at most ──► queue ──► read()
                 what comes, as it comes                bounded: a slow reader holds the server's streams back

The first error ends all. Two kinds are tried again first, once: a single request that brought nothing, in a group that
has brought something, where it was (before that the whole group is tried again, by whoever routes it); and a group in
one request that is refused as a whole, as singles: servers honour n within limits of their own.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from motet.engines.refusal import NOT_TAKEN
from motet.engines.upstream.answer import Answer
from motet.engines.upstream.ask import Ask, Asks
from motet.engines.upstream.base import TextStep, TextUsage, may_go_elsewhere
from motet.engines.upstream.client import UpstreamServer
from motet.engines.upstream.usage import summed
from motet.errors import MotetError, RequestError, UpstreamRefusalError


class UpstreamGroup:
    """Owns its tasks; `aclose` ends them, and with them their connections."""

    worker = ""
    """Whoever routes knows it."""

    def __init__(self, server: UpstreamServer, asks: Asks, *, on_end: Callable[["UpstreamGroup"], None]) -> None:
        self._server = server
        self._asks = asks
        self._on_end = on_end
        self._queue: asyncio.Queue[TextStep | Exception | None] = asyncio.Queue(2 * server.options.max_singles)
        self._tasks: list[asyncio.Task[None]] = []
        self._unfinished = 0
        """Tasks that may bring more."""
        self._begun = False
        """Whether anything has come."""
        self._usages: dict[int, TextUsage | None] = {}
        self._failure: Exception | None = None

    @property
    def usage(self) -> TextUsage | None:
        return summed(self._usages, prompts_at=self._asks.prompts_at, num_requests=self._asks.number)

    async def read(self) -> Sequence[TextStep]:
        if not self._tasks and self._failure is None:
            self._start()
        steps: list[TextStep] = []
        while self._failure is None and self._unfinished and not (steps and self._queue.empty()):
            item = await self._queue.get()
            if item is None:
                self._unfinished -= 1
            elif isinstance(item, TextStep):
                steps.append(item)
            elif not self._again_as_singles(item):
                self._failure = item
        if self._failure is not None:
            raise self._failure
        return steps

    def fail(self, error: MotetError) -> None:
        """Ends it with `error`, which whoever reads it gets."""
        self._failure = self._failure or error
        self._cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    async def aclose(self) -> None:
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._on_end(self)

    def _start(self) -> None:
        asks = iter(self._asks)
        self._unfinished = min(self._asks.number, self._server.options.max_singles)
        self._tasks += [asyncio.create_task(self._run(asks)) for _ in range(self._unfinished)]

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _again_as_singles(self, error: Exception) -> bool:
        refused = isinstance(error, UpstreamRefusalError) and error.status in NOT_TAKEN
        if self._begun or not refused or self._asks.number == self._asks.request.num_choices:
            return False
        try:
            self._asks = self._asks.as_singles()
        except RequestError:
            return False
        self._start()
        return True

    async def _run(self, asks: Iterator[Ask]) -> None:
        """One request after another; what goes wrong is handed to the reader."""
        try:
            for ask in asks:
                await self._answer(ask)
            await self._queue.put(None)
        except Exception as error:
            await self._queue.put(error)

    async def _answer(self, ask: Ask) -> None:
        answer = Answer(self._server, ask)
        try:
            try:
                step = await answer.read()
            except MotetError as error:
                if answer.begun or not self._begun or not may_go_elsewhere(error):
                    raise
                answer.close()
                answer = Answer(self._server, ask)
                step = await answer.read()
            while step is not None:
                self._begun = True
                await self._queue.put(step)
                step = await answer.read()
            self._usages[ask.first] = answer.usage
        except UpstreamRefusalError as error:
            raise (error.of(ask.name.capitalize()) if self._begun else error) from error
        finally:
            answer.close()
