"""A vLLM server as an engine: a group is a few requests to the server, and one stream of deltas.

1. The server's keeper calls `VLLMServer.report` and makes a `VLLMEngine` of the report. A restarted server has another
   `engine_id`, and becomes another `VLLMEngine`.
2. Without a ticket, all requests of a group are sent at once. With a ticket:

                      ┌─ first token ─► the other requests are sent, without ticket
    leader, ticket ───┼─ too late ────► closed ─┐
                      ├─ failed ────────────────┴─► all choices are requested again, without ticket, once
                      └─ refused, or its server is lost: the group ends with this error

   A request for log-probabilities of the prompt is sent first as well, and the others when it is answered.
3. Each request has a connection: open ──► read, deliver, wait until the reader has taken it ──► read ... ──► end.
   Closing the connection ends the request on the server. A connection is closed when no choice needs its children any
   more. If all children have finished, the rest of the answer is read instead, so that the connection can be reused.
4. A server that hangs keeps its connections open. Its keeper calls `lost` when it sends no more reports.

Who frees what: from the moment the decode server has taken the leader's request it owns the ticket. It reads the KV, or
releases the ticket on the prefill server, also when the connection is closed. Before that moment the group owns the
ticket, and releases it when the group or the leader ends. If the server is lost, neither is possible: then the owner of
the group releases the ticket through another server.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from motet.engine import GroupStream
from motet.engines.http import CALL_TIMEOUT_S
from motet.engines.server_engine import ServerEngine
from motet.engines.vllm.requests import (
    VLLMRequest,
    params_from,
    plan_requests,
    prompt_request,
    ticket_from,
    without_ticket,
)
from motet.engines.vllm.vllm_server import VLLMServer
from motet.engines.vllm.vllm_wire import VLLMPiece, VLLMUsage
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, MotetError, RequestError, WorkerFaultError
from motet.ids import RequestId
from motet.metrics.routing import PullFallback, TicketEnd, TicketLog
from motet.metrics.stats import EngineStats
from motet.transfer.ticket import Ticket
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta, PromptReport

logger = logging.getLogger(__name__)


class VLLMEngine(ServerEngine["VLLMGroup"]):
    """An `Engine`: one start of a vLLM server."""

    def __init__(
        self,
        server: VLLMServer,
        report: EngineReport,
        *,
        tickets: TicketLog,
        leader_timeout_s: float,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`leader_timeout_s` is the maximum time from the submission of a group with a ticket to its first token, after
        which the prompt is computed. `tickets` is shared by all engines of a gateway."""
        super().__init__(server.name, report)
        self.tickets = tickets
        self.leader_timeout_s = leader_timeout_s
        self.wait = wait
        self._server = server

    def generate(self, request: GenerateRequest) -> GroupStream:
        if self._closed is not None:
            raise self._closed
        try:
            group = VLLMGroup(self._of_model(request), self._server, engine=self)
        except EngineError:
            if request.ticket is not None:
                self.start_release(request.ticket, request.trace)
            raise
        self._groups[request.request_id] = group
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Returns a ticket. Cancelling closes the connection, which frees the group on the server; a ticket that was on
        its way at that moment is lost, and its lease expires."""
        if readers > self.info.ticket_readers:
            raise RequestError(
                f"a ticket of {self._name} is for {self.info.ticket_readers} readers, not for {readers}: "
                "prefill again for each other reader"
            )
        made = await self._call(self._server.prefill(prompt_request(self._of_model(request))))
        first, *others = [ticket_from(params, engine_id=self.engine_id, prompt=request.prompt) for params in made]
        for ticket in others:
            self.start_release(ticket, request.trace)
        return first

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        """Releases a ticket through this server, whichever engine made it."""
        async with self.tickets.release(ticket) as due:
            if not due:
                return
            end = TicketEnd.LEFT
            try:
                with contextlib.suppress(MotetError):
                    rejecting = self._server.reject(params_from(ticket), self.info.model, trace=trace)
                    if await self._call(rejecting):
                        end = TicketEnd.RELEASED
            finally:
                self.tickets.ended(ticket, end)

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        await self._call(self._server.load_adapter(name, path, in_place=in_place))

    async def unload_adapter(self, name: str) -> None:
        await self._call(self._server.unload_adapter(name))

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if (group := self._groups.get(request_id)) is not None:
            group.stop(index)

    async def stats(self) -> EngineStats:
        return (await self._call(self._server.report(timeout_s=CALL_TIMEOUT_S))).stats_of(self._name)

    def start_release(self, ticket: Ticket, trace: str) -> None:
        """Releases a ticket in a task, since no caller waits for the result."""
        self._start(self.release(ticket, trace=trace))

    def _of_model(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request with the model's name, which vLLM requires even if it has only one model."""
        return request if request.model else msgspec.structs.replace(request, model=self.info.model)


ChoicePiece = tuple[int, VLLMPiece]
"""The index of a choice, and a piece of its tokens."""


class Connection:
    """One open request, with the choices that get its tokens. Owned by its group, which waits for `task`."""

    def __init__(self, server: VLLMServer, vllm_request: VLLMRequest, *, group: "VLLMGroup", held: bool) -> None:
        """With `held`, the connection stays open until its first token even if no choice needs its children."""
        self.opened = False
        """True once the server has taken the request."""
        self.started = False
        """True once a token, or the end of a child, has arrived."""
        self._server = server
        self._request = vllm_request
        self._group = group
        self._held = held
        self._listening = {child: set(indices) for child, indices in enumerate(vllm_request.choices) if indices}
        """Choices that get the tokens of each unfinished child."""
        self._unfinished = set(range(len(vllm_request.choices)))
        self.taken = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def mute(self, index: int) -> None:
        """Delivers nothing more to this choice."""
        for child, listening in list(self._listening.items()):
            listening.discard(index)
            if not listening:
                del self._listening[child]
        self._close_if_unused()

    async def _run(self) -> None:
        try:
            await self._read_all()
        except Exception as error:  # the group's reader raises it
            if self._listening or self._held:  # otherwise no choice needs it
                self._group.failed(self, error)

    async def _read_all(self) -> None:
        answer = await self._server.open(self._request)
        try:
            self.opened = True
            while items := await answer.read():
                self.taken.clear()
                if self._deliver(items):
                    await self.taken.wait()
            if left := sorted(index for listening in self._listening.values() for index in listening):
                raise EngineDiedError(f"{self._server.name} broke off before choices {left} ended")
            if self._held:
                raise EngineDiedError(f"{self._server.name} broke off before the first token")
        finally:
            answer.close()

    def _deliver(self, items: list[VLLMPiece | VLLMUsage]) -> bool:
        """Delivers what was read. Returns True if the connection must wait until the group's reader has taken it."""
        pieces: list[ChoicePiece] = []
        usage: VLLMUsage | None = None
        for item in items:
            if isinstance(item, VLLMUsage):
                usage = item
                continue
            if not item.token_ids and item.finish is None:
                continue
            if item.index not in self._unfinished:
                raise WorkerFaultError(f"{self._server.name} sent tokens of choice {item.index}, which is not open")
            self.started = True
            pieces += [(index, item) for index in sorted(self._listening.get(item.index, ()))]
            if item.finish is not None:
                self._unfinished.discard(item.index)
                self._listening.pop(item.index, None)
        if self.started:
            self._held = False
        self._group.delivered(self, pieces, usage=usage)
        self._close_if_unused()
        return bool(pieces and self._listening)

    def _close_if_unused(self) -> None:
        if self._unfinished and not self._listening and not self._held:
            self.task.cancel()


class VLLMGroup:
    """A `GroupStream`. Its engine releases a ticket that the server did not take, and removes an ended group."""

    def __init__(self, request: GenerateRequest, server: VLLMServer, *, engine: VLLMEngine) -> None:
        """Raises EngineError if the group has no valid requests; then nothing has been sent."""
        self.request = request
        self._server = server
        self._engine = engine
        self._plan = plan_requests(request)
        self._ticket = request.ticket
        """The group's ticket while the group owns it."""
        self._unfinished = {start.index for start in request.choices}
        """Choices whose end the reader has not received."""
        self._connections: set[Connection] = set()
        self._leader: Connection | None = None
        """Connection with the ticket, while the other requests wait for its first token."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[tuple[Connection | None, list[ChoicePiece], VLLMUsage | None]] = []
        """Pieces that the reader has not taken, and their connections, which wait until it has (None: no stream)."""
        self._news = asyncio.Event()
        self._cached_tokens: int | None = None
        self._prompt: tuple[bytes, ...] | None = None
        self._prompt_reported = False
        self._error: Exception | None = None
        self._ended = False
        self._begin()

    async def settled(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def __aiter__(self) -> "VLLMGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        while (delta := self._next()) is None:
            if not self._unfinished:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return delta

    async def aclose(self) -> None:
        self._ready.clear()
        self._unfinished.clear()
        self._end()
        await self.settled()

    def fail(self, error: Exception) -> None:
        """Ends the group with `error`, after the deltas that have already arrived."""
        if not self._ended:
            self._error = error
            self._end()

    def stop(self, index: int) -> None:
        """Ends a choice for the reader. A choice that has not been requested yet never will be."""
        self._unfinished.discard(index)
        if not self._unfinished:
            self._end()
        for connection in self._connections:
            connection.mute(index)

    def delivered(self, connection: Connection, pieces: list[ChoicePiece], *, usage: VLLMUsage | None) -> None:
        """Queues what a connection has read. The connection continues when `connection.taken` is set."""
        self._ready.append((connection, pieces, usage))
        self._news.set()
        if connection is self._leader and connection.started:
            self._follow()

    def failed(self, connection: Connection, error: Exception) -> None:
        """Handles the error that ended a connection; called at most once, and last."""
        # Any other error would occur again, or means that the server died.
        if connection is self._leader and type(error) is EngineError:
            self._fall_back(connection, PullFallback.FAILED, why=error.message)
        elif connection in self._connections:
            self.fail(error)

    def _begin(self) -> None:
        if self._plan.prompt is not None:
            self._own(asyncio.create_task(self._read_scored(self._plan.prompt)))
        if self._plan.leader is not None:
            self._leader = self._connect(self._plan.leader, held=True)
            self._own(asyncio.create_task(self._limit_leader()))
        elif self._plan.prompt is None:
            for vllm_request in self._plan.rest:
                self._connect(vllm_request)

    def _follow(self) -> None:
        assert self._plan.leader is not None and self.request.ticket is not None  # called only with a leader
        self._cached_tokens = self.request.ticket.cached_tokens
        self._leader = None
        self._end_ticket(taken=True)
        self._request_without_ticket(self._unfinished.difference(self._plan.leader.indices))

    def _fall_back(self, leader: Connection, reason: PullFallback, *, why: str) -> None:
        self._engine.tickets.pull_fallbacks[reason.value] += 1
        request = self.request
        fields = {"request_id": request.trace, "group": request.request_id, "reason": reason.value, "error": why}
        logger.warning("the KV of a prompt was not fetched; decode computes it", extra={"fields": fields})
        self._connections.discard(leader)
        leader.task.cancel()
        self._leader = None
        self._end_ticket(taken=False)  # a decode server that took it and failed does not release it
        self._request_without_ticket(self._unfinished, name="again")

    async def _limit_leader(self) -> None:
        limit_s = self._engine.leader_timeout_s
        await self._engine.wait(limit_s)
        if self._leader is not None:
            self._fall_back(self._leader, PullFallback.LATE, why=f"no token within {limit_s:g} s")

    async def _read_scored(self, vllm_request: VLLMRequest) -> None:
        """Reads the answer with the log-probabilities of the prompt. The other requests follow, unless they wait for a
        ticket's first token."""
        try:
            self._prompt, items = await self._server.scored(vllm_request)
            pieces, usage = _complete_choices(vllm_request, items)
            self._ready.append((None, pieces, None))
            if self._plan.leader is None:
                self._cached_tokens = usage.cached_tokens or 0
                self._request_without_ticket(self._unfinished.difference(vllm_request.indices))
        except Exception as error:  # the reader raises it
            self.fail(error)
        self._news.set()

    def _request_without_ticket(self, indices: Iterable[int], *, name: str = "") -> None:
        """Requests choices without a ticket. Plans the requests again, since some choices may have been stopped."""
        request = without_ticket(self.request, indices, name=name)
        for vllm_request in plan_requests(request).rest if request.choices else ():
            self._connect(vllm_request)

    def _connect(self, vllm_request: VLLMRequest, *, held: bool = False) -> Connection:
        connection = Connection(self._server, vllm_request, group=self, held=held)
        self._connections.add(connection)
        self._own(connection.task)
        return connection

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._ended and not self._tasks:
            self._engine.forget(self)

    def _next(self) -> GroupDelta | None:
        """Returns all that has arrived as one delta. The first delta waits for the prompt's log-probabilities."""
        if self._plan.prompt is not None and self._prompt is None:
            return None
        ready, self._ready = self._ready, []
        pieces_of: dict[int, list[VLLMPiece]] = {}
        for connection, pieces, usage in ready:
            if connection is not None:
                connection.taken.set()
            if self._cached_tokens is None and usage is not None:
                self._cached_tokens = usage.cached_tokens
            for index, piece in pieces:
                if index in self._unfinished:
                    pieces_of.setdefault(index, []).append(piece)
                    if piece.finish is not None:
                        self._unfinished.discard(index)
        choices = tuple(_joined(index, pieces_of[index]) for index in sorted(pieces_of))
        if not self._unfinished:
            self._end()
        if not choices:
            return None
        # vLLM reports cached tokens at the end of an answer: they are known here only if it arrived in one piece.
        report = None if self._prompt_reported else PromptReport(self._cached_tokens or 0, self._prompt)
        self._prompt_reported = True
        return GroupDelta(self.request.request_id, choices, report)

    def _end_ticket(self, *, taken: bool) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        if taken:
            self._engine.tickets.ended(ticket, TicketEnd.TAKEN)
        else:
            self._engine.start_release(ticket, self.request.trace)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for task in self._tasks:
            task.cancel()
        if not isinstance(self._error, EngineDiedError):
            self._end_ticket(taken=self._leader is not None and self._leader.opened)
        self._news.set()
        if not self._tasks:
            self._engine.forget(self)


def _complete_choices(
    vllm_request: VLLMRequest, items: Iterable[VLLMPiece | VLLMUsage]
) -> tuple[list[ChoicePiece], VLLMUsage]:
    """Returns the choices and the usage of an answer without a stream. Raises WorkerFaultError unless all are there."""
    missing, pieces, usage = {*vllm_request.indices}, list[ChoicePiece](), VLLMUsage()
    for item in items:
        if isinstance(item, VLLMUsage):
            usage = item
        elif 0 <= item.index < len(vllm_request.choices) and item.finish is not None:
            missing.difference_update(indices := vllm_request.choices[item.index])
            pieces += [(index, item) for index in indices]
    if missing:
        raise WorkerFaultError(f"the vLLM server sent no end of choices {sorted(missing)}")
    return pieces, usage


def _joined(index: int, pieces: list[VLLMPiece]) -> ChoiceDelta:
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    known = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = tuple(logprob for some in known for logprob in some) if known else None
    return ChoiceDelta(index, token_ids, logprobs, pieces[-1].finish)
