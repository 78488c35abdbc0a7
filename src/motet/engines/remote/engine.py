"""A `motet serve` server as an engine: our own protocol over HTTP, a connection a group.

1. who keeps the worker asks `EngineServer.report` and makes a `RemoteEngine` of what it is; a worker that was started
   again has another `engine_id`, and becomes another `RemoteEngine`
2. a group lives as long as its connection: closing it frees the group there, and losing it ends the group here
3. a worker that hangs keeps its connections; whoever finds it silent calls `lost`
"""

import contextlib

import msgspec

from motet.engines.base import GroupStream, NoGroup
from motet.engines.calls import QUESTION_TIMEOUT_S, REPORT_TIMEOUT_S
from motet.engines.remote.group import RemoteGroup
from motet.engines.remote.server import EngineServer
from motet.engines.under_way import UnderWay, stats_in
from motet.engines.wire import EngineReport, StopChoice
from motet.errors import MotetError
from motet.ids import RequestId
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineInfo, EngineStats, GenerateRequest


class RemoteEngine:
    """An `Engine`. Closing it ends what it has under way, not the server."""

    def __init__(self, server: EngineServer, report: EngineReport) -> None:
        self.engine_id = report.engine_id
        """Of the start of the worker that this is."""
        self._server = server
        self._info = msgspec.structs.replace(report.info, pid=None)
        self._under_way = UnderWay[RemoteGroup](server.name)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def generate(self, request: GenerateRequest) -> GroupStream:
        if self._under_way.closed is not None:
            return NoGroup(self._under_way.closed)
        group = RemoteGroup(self._server, request, self._over)
        self._under_way.add(request.request_id, group)
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Cancelling it closes the connection, which frees the group there; a ticket that was on its way at that moment
        is lost, and its lease expires."""
        body = msgspec.msgpack.encode(request)
        path = f"/engine/prefill?readers={readers}"
        answer = await self._under_way.call(self._server.ask("POST", path, body, trace=request.trace, timeout_s=None))
        return self._server.decode(answer, Ticket)

    async def release(self, ticket: Ticket) -> None:
        with contextlib.suppress(MotetError):
            await self._under_way.call(self._server.ask("POST", "/engine/release", msgspec.msgpack.encode(ticket)))

    async def connect(self, address: TransferAddress) -> None:
        """Lets the worker get to know another one before it is needed. Raises MotetError if that cannot be."""
        await self._under_way.call(self._server.ask("POST", "/engine/connect", msgspec.msgpack.encode(address)))

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        """The worker is told in a task, since nobody waits for what it says. When the last choice ends this way, the
        end of the connection tells it."""
        group = self._under_way.group(request_id)
        if group is None:
            return
        group.choice_ended(index)
        if not group.released:
            self._under_way.start(self._tell_stop(group, index))

    async def stats(self) -> EngineStats:
        report = await self._under_way.call(self._server.report(timeout_s=QUESTION_TIMEOUT_S))
        return stats_in(report, self._server.name)

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> EngineReport:
        """The heartbeat. Not ended by `lost`, since it tells whether the worker has come back."""
        return await self._server.report(timeout_s=timeout_s)

    def lost(self, error: MotetError) -> None:
        """Ends every group, prefill and question with `error`, and closes their connections. What comes after is asked
        as ever."""
        self._under_way.lost(error)

    async def close(self) -> None:
        await self._under_way.close()

    def _over(self, group: RemoteGroup) -> None:
        request = group.request
        self._under_way.over(request.request_id, group)
        if request.ticket is not None and group.withdrawn and self._under_way.closed is None:
            self._under_way.start(self.release(request.ticket))  # it may not have read that the ticket is its to end

    async def _tell_stop(self, group: RemoteGroup, index: int) -> None:
        await group.settled()
        body = msgspec.msgpack.encode(StopChoice(request_id=group.request.request_id, index=index))
        with contextlib.suppress(MotetError):  # then the choice goes on until its group ends
            await self._under_way.call(self._server.ask("POST", "/engine/stop", body, trace=group.request.trace))
