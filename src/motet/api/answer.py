"""The response of a request that generates, streamed or whole: it owns the groups from the first to the last moment.

    1. open the groups                 an error here, or at the first step, still has its HTTP status
    2. wait for the first step         and meanwhile, as all along, for the client to leave
    3. send headers, then what the writer makes of each step, in one message a step
    4. close the groups                whatever happened: end, error, client gone, server stopping

It is an object and not a generator, since a generator that was never started never cleans up.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.api.event_bytes import failure_events
from motet.api.open_groups import SENT, OpenGroups, Step
from motet.api.plan import Plan
from motet.api.service import Service
from motet.errors import MotetError
from motet.text.usage import Usage

log = logging.getLogger("motet.api")

CLIENT_GONE = 499
"""Logged and counted as nginx does; nobody is there to receive it."""


class Writer(Protocol):
    """Turns the steps of one request into bytes. Pure: one writer an answer, fed in order."""

    @property
    def streams(self) -> bool:
        """Whether there are bytes before the end; if not, an error at any time still has its HTTP status."""
        ...

    def feed(self, steps: Sequence[Step], usage: Usage) -> bytes: ...

    def close(self, usage: Usage) -> bytes: ...


class Answer(Response):
    """Runs a plan and sends what its writer makes of it."""

    def __init__(self, service: Service, plan: Plan, writer: Writer) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
            if writer.streams
            else {"content-type": "application/json"}
        )
        self._groups = OpenGroups(service, plan)
        self._writer = writer
        self._started = False
        self._status = CLIENT_GONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            failure = await self._run(receive, send)
            if failure is not None:
                raise failure  # nothing was sent yet: answered with its status
        finally:
            with anyio.CancelScope(shield=True):
                await self._groups.aclose(status=self._status)

    async def _run(self, receive: Receive, send: Send) -> Exception | None:
        """Answers until the end or until the client leaves; the error if there is one and it can still be answered."""
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_client_leaves, receive, tasks.cancel_scope)
            try:
                self._groups.open()
                await self._write(self._groups.steps(tasks), send)
                self._status = SENT
            except Exception as error:
                failure = await self._fail(error, send)
            tasks.cancel_scope.cancel()
        return failure

    async def _write(self, steps: "Steps", send: Send) -> None:
        while (batch := await steps.read()) is not None:
            if data := self._writer.feed(batch, self._groups.usage):
                await self._send(send, data, more=True)
        await self._send(send, self._writer.close(self._groups.usage), more=False)

    async def _fail(self, error: Exception, send: Send) -> Exception | None:
        self._status = error.status if isinstance(error, MotetError) else 500
        if not (self._started and self._writer.streams):
            return error
        if not isinstance(error, MotetError):
            log.error("a stream failed", exc_info=error)
        await self._send(send, failure_events(error), more=False)
        return None

    async def _send(self, send: Send, data: bytes, *, more: bool) -> None:
        if not self._started:
            self._started = True
            if not more:
                self.headers["content-length"] = str(len(data))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})


class Steps(Protocol):
    async def read(self) -> list[Step] | None: ...


async def _cancel_when_client_leaves(receive: Receive, answering: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()
