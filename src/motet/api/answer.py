"""The response of a request that generates, streamed or whole: it owns the groups from the first to the last moment.

    1. open the groups                 an error here, or at the first step, still has its HTTP status
    2. wait for the first step         and meanwhile, as all along, for the client to leave
    3. send headers, then what the writer makes of each step, in one message a step and straight to the server
    4. close the groups                whatever happened: end, error, client gone, server stopping

It is an object and not a generator, since a generator that was never started never cleans up.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.api.event_bytes import failure_events
from motet.api.request_id import straight_send
from motet.api.while_client_stays import while_client_stays
from motet.errors import MotetError

log = logging.getLogger("motet.api")

Step = TypeVar("Step")
"""What came in one go."""
StepOut = TypeVar("StepOut", covariant=True)
StepIn = TypeVar("StepIn", contravariant=True)
Used = TypeVar("Used")
"""How what was used is told."""
UsedOut = TypeVar("UsedOut", covariant=True)
UsedIn = TypeVar("UsedIn", contravariant=True)

WORKER_HEADER = "x-motet-worker"
SENT = 200
"""The status of a request whose whole answer has been sent."""
CLIENT_GONE = 499
"""Logged and counted as nginx does; nobody is there to receive it."""


class Steps(Protocol[StepOut]):
    async def read(self) -> Sequence[StepOut] | None:
        """What is there to show, at least one step; None after the end."""
        ...


class Groups(Protocol[StepOut, UsedOut]):
    """The groups of one request while they run (`OpenGroups`, `UpstreamGroups`)."""

    @property
    def workers(self) -> Sequence[str]:
        """Who writes them, as far as is known by now, each once."""
        ...

    def open(self) -> None:
        """Raises before anything runs if they are not to be let in."""
        ...

    def usage(self) -> UsedOut:
        """Of the whole request, up to now."""
        ...

    def steps(self, tasks: TaskGroup) -> Steps[StepOut]:
        """To be read once; `tasks` is where readers of several groups run."""
        ...

    async def aclose(self, *, status: int) -> None:
        """Must follow, also when `open` failed half way or never came. `status`: how the request went."""
        ...


class Writer(Protocol[StepIn, UsedIn]):
    """Turns the steps of one request into bytes. Pure: one writer an answer, fed in order."""

    @property
    def streams(self) -> bool:
        """Whether there are bytes before the end; if not, an error at any time still has its HTTP status."""
        ...

    def feed(self, steps: Sequence[StepIn], usage: Callable[[], UsedIn]) -> bytes:
        """`usage`: of the request up to now; asked only where a chunk tells it, since it is summed over all choices."""
        ...

    def close(self, usage: UsedIn) -> bytes: ...


class Answer(Response, Generic[Step, Used]):
    """Runs the groups of a request and sends what its writer makes of them."""

    def __init__(
        self,
        groups: Groups[Step, Used],
        writer: Writer[Step, Used],
        *,
        break_off: Callable[[Exception], bytes] = failure_events,
    ) -> None:
        """`break_off`: how a stream that has begun ends when it cannot go on."""
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
            if writer.streams
            else {"content-type": "application/json"}
        )
        self._groups = groups
        self._writer = writer
        self._last_words = break_off
        self._started = False
        self._status = CLIENT_GONE
        self._failure: Exception | None = None
        """What went wrong before anything was sent: to be answered with its own status."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_start, self._send = send, straight_send(scope)
        try:
            await while_client_stays(receive, self._answer)
            if self._failure is not None:
                raise self._failure
        finally:
            with anyio.CancelScope(shield=True):
                await self._groups.aclose(status=self._status)

    async def _answer(self, tasks: TaskGroup) -> None:
        try:
            self._groups.open()
            await self._write(self._groups.steps(tasks))
            self._status = SENT
        except Exception as error:
            self._status = error.status if isinstance(error, MotetError) else 500
            if self._started and self._writer.streams:
                await self._break_off(error)
            else:
                self._failure = error

    async def _write(self, steps: Steps[Step]) -> None:
        feed, usage, send = self._writer.feed, self._groups.usage, self._send
        while (batch := await steps.read()) is not None:
            if data := feed(batch, usage):
                if not self._started:
                    await self._start()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        data = self._writer.close(usage())
        if not self._started:
            self.headers["content-length"] = str(len(data))
            await self._start()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self) -> None:
        self._started = True
        if workers := self._groups.workers:
            self.headers[WORKER_HEADER] = ", ".join(workers)
        await self._send_start({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _break_off(self, error: Exception) -> None:
        if not isinstance(error, MotetError):
            log.error("a stream failed", exc_info=error)
        await self._send({"type": "http.response.body", "body": self._last_words(error), "more_body": False})
