"""A vLLM server as an engine: a group becomes a few requests there, and a ticket of vLLM's one of ours.

1. who keeps the server asks `VLLMServer.report` and makes a `VLLMEngine` of what it is; a server that was started again
   has another `engine_id`, and becomes another `VLLMEngine`
2. a group lives as long as its connections; see `group`
3. a server that hangs keeps its connections; whoever finds it silent calls `lost`
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from motet.engines.base import GroupStream, NoGroup
from motet.engines.calls import QUESTION_TIMEOUT_S
from motet.engines.under_way import UnderWay, stats_in
from motet.engines.vllm.ask import Ask
from motet.engines.vllm.connection import Generating
from motet.engines.vllm.figures import PDFigures, TicketEnd
from motet.engines.vllm.group import LeaderRules, VLLMGroup
from motet.engines.vllm.plan import plain_ask
from motet.engines.vllm.tickets import KVParams, params_from, ticket_from
from motet.engines.wire import EngineReport
from motet.errors import EngineError, MotetError, RequestError
from motet.ids import RequestId
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest


class Server(Generating, Protocol):
    """What an engine asks of its server (`VLLMServer`)."""

    async def report(self, *, timeout_s: float) -> EngineReport: ...

    async def prefill(self, ask: Ask, *, trace: str = "", session_id: str = "") -> list[KVParams]: ...

    async def reject(self, params: Mapping[str, object], model: str) -> bool: ...


class VLLMEngine:
    """An `Engine`. Closing it ends what it has under way, not the server."""

    def __init__(
        self,
        server: Server,
        report: EngineReport,
        *,
        figures: PDFigures,
        leader_timeout_s: float,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`leader_timeout_s`: from the submission of a group with a ticket to its first token; then it is computed from
        the prompt. `figures`: shared by all engines of a gateway."""
        self.engine_id = report.engine_id
        """Of the start of the server that this is."""
        self._server = server
        self._info = report.info
        self._figures = figures
        self._rules = LeaderRules(leader_timeout_s, figures, wait)
        self._under_way = UnderWay[VLLMGroup](server.name)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def generate(self, request: GenerateRequest) -> GroupStream:
        if self._under_way.closed is not None:
            return NoGroup(self._under_way.closed)
        try:
            group = VLLMGroup(
                self._of_model(request), self._server, self._rules, give_back=self._give_back, over=self._over
            )
        except EngineError as error:
            if request.ticket is not None:
                self._give_back(request.ticket)
            return NoGroup(error)
        self._under_way.add(request.request_id, group)
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Cancelling it closes the connection, which frees the group there; a ticket that was on its way at that moment
        is lost, and its lease expires."""
        if readers > self._info.ticket_readers:
            raise RequestError(
                f"a ticket of {self._server.name} is for {self._info.ticket_readers} readers, not for {readers}: "
                "prefill once for each of the others"
            )
        ask = plain_ask(self._of_model(request))
        asked = self._server.prefill(ask, trace=request.trace, session_id=request.session_id)
        first, *others = (
            ticket_from(params, engine_id=self.engine_id, prompt=request.prompt)
            for params in await self._under_way.call(asked)
        )
        for ticket in others:
            self._give_back(ticket)
        return first

    async def release(self, ticket: Ticket) -> None:
        """Another engine may have made it: prefill is told by the server here."""
        if self._figures.is_over(ticket):
            return
        released = False
        try:
            with contextlib.suppress(MotetError):
                released = await self._under_way.call(self._server.reject(params_from(ticket), self._info.model))
        finally:
            self._figures.ended(ticket, TicketEnd.RELEASED if released else TicketEnd.LEFT)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        group = self._under_way.group(request_id)
        if group is not None:
            group.stop(index)

    async def stats(self) -> EngineStats:
        report = await self._under_way.call(self._server.report(timeout_s=QUESTION_TIMEOUT_S))
        return stats_in(report, self._server.name)

    def lost(self, error: MotetError) -> None:
        """Ends every group, prefill and question with `error`, and closes their connections. What comes after is asked
        as ever."""
        self._under_way.lost(error)

    async def close(self) -> None:
        await self._under_way.close()

    def check(self) -> None:
        """Raises unless nothing is under way."""
        self._under_way.check()

    def _of_model(self, request: GenerateRequest) -> GenerateRequest:
        """vLLM wants to be told which, also if it has one only."""
        return request if request.model else msgspec.structs.replace(request, model=self._info.model)

    def _over(self, group: VLLMGroup) -> None:
        self._under_way.over(group.request.request_id, group)

    def _give_back(self, ticket: Ticket) -> None:
        """In a task, since nobody waits for it."""
        self._under_way.start(self.release(ticket))
