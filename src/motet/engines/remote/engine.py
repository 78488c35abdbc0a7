"""A `motet serve` server as an engine: our own protocol over HTTP, a connection a group.

1. who keeps the worker asks `EngineServer.report` and makes a `RemoteEngine` of what it is; a worker that was started
   again has another `engine_id`, and becomes another `RemoteEngine`
2. a group lives as long as its connection: closing it frees the group there, and losing it ends the group here
3. a worker that hangs keeps its connections; whoever finds it silent calls `lost`
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TypeVar

import msgspec

from motet.engines.base import GroupStream, NoGroup, WorkerState
from motet.engines.remote.group import RemoteGroup
from motet.engines.remote.server import QUESTION_TIMEOUT_S, REPORT_TIMEOUT_S, EngineServer
from motet.engines.wire import EngineReport, StopChoice
from motet.errors import EngineClosedError, EngineDiedError, EngineSilentError, MotetError
from motet.ids import RequestId
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineInfo, EngineStats, GenerateRequest

T = TypeVar("T")


class RemoteEngine:
    """An `Engine`. Closing it ends what it has under way, not the server."""

    def __init__(self, server: EngineServer, report: EngineReport) -> None:
        self.engine_id = report.engine_id
        """Of the start of the worker that this is."""
        self._server = server
        self._info = msgspec.structs.replace(report.info, pid=None)
        self._groups: dict[RequestId, RemoteGroup] = {}
        self._calls: dict[asyncio.Timeout, MotetError | None] = {}
        """What is asked at this moment, and the error it was ended with."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: EngineClosedError | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    def generate(self, request: GenerateRequest) -> GroupStream:
        if self._closed is not None:
            return NoGroup(self._closed)
        group = RemoteGroup(self._server, request, self._over)
        self._groups[request.request_id] = group
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Cancelling it closes the connection, which frees the group there; a ticket that was on its way at that moment
        is lost, and its lease expires."""
        body = msgspec.msgpack.encode(request)
        path = f"/engine/prefill?readers={readers}"
        answer = await self._call(self._server.ask("POST", path, body, trace=request.trace, timeout_s=None))
        return self._server.decode(answer, Ticket)

    async def release(self, ticket: Ticket) -> None:
        with contextlib.suppress(MotetError):
            await self._call(self._server.ask("POST", "/engine/release", msgspec.msgpack.encode(ticket)))

    async def connect(self, address: TransferAddress) -> None:
        """Lets the worker get to know another one before it is needed. Raises MotetError if that cannot be."""
        await self._call(self._server.ask("POST", "/engine/connect", msgspec.msgpack.encode(address)))

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        """The worker is told in a task, since nobody waits for what it says. When the last choice ends this way, the
        end of the connection tells it."""
        group = self._groups.get(request_id)
        if group is None:
            return
        group.choice_ended(index)
        if not group.released:
            self._start(self._tell_stop(group, index))

    async def stats(self) -> EngineStats:
        report = await self._call(self._server.report(timeout_s=QUESTION_TIMEOUT_S))
        if report.stats is not None:
            return report.stats
        if report.state is WorkerState.DEAD:
            raise EngineDiedError(f"{self._server.name} has lost its engine")
        raise EngineSilentError(f"the engine of {self._server.name} gives no sign of life")

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> EngineReport:
        """The heartbeat. Not ended by `lost`, since it tells whether the worker has come back."""
        return await self._server.report(timeout_s=timeout_s)

    def lost(self, error: MotetError) -> None:
        """Ends every group, prefill and question with `error`, and closes their connections. What comes after is asked
        as ever."""
        for group in list(self._groups.values()):
            group.fail(error)
        for call, ended_with in self._calls.items():
            if ended_with is None:
                self._calls[call] = error
                call.reschedule(asyncio.get_running_loop().time())
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        if self._closed is None:
            self._closed = EngineClosedError(f"{self._server.name} is not asked any more: this server is closing")
        groups = list(self._groups.values())
        self.lost(self._closed)
        for group in groups:
            await group.opened()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _over(self, group: RemoteGroup) -> None:
        request = group.request
        if self._groups.get(request.request_id) is group:
            del self._groups[request.request_id]
        if request.ticket is not None and group.withdrawn and self._closed is None:
            self._start(self.release(request.ticket))  # the worker may not have read that the ticket is its to end

    async def _tell_stop(self, group: RemoteGroup, index: int) -> None:
        await group.opened()
        body = msgspec.msgpack.encode(StopChoice(request_id=group.request.request_id, index=index))
        with contextlib.suppress(MotetError):  # then the choice goes on until its group ends
            await self._server.ask("POST", "/engine/stop", body, trace=group.request.trace)

    async def _call(self, question: Coroutine[None, None, T]) -> T:
        """Asks, unless `lost` comes first."""
        if self._closed is not None:
            question.close()
            raise self._closed
        call = asyncio.timeout(None)
        self._calls[call] = None
        try:
            async with call:
                return await question
        except TimeoutError:
            raise self._calls[call] or EngineSilentError(f"{self._server.name} did not answer") from None
        finally:
            del self._calls[call]

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
