"""A vLLM server as an engine: a group becomes a few requests there, and one stream here.

1. the server's keeper asks `VLLMServer.report` and makes a `VLLMEngine` of the answer; a server that was started
   again has another `engine_id`, and becomes another `VLLMEngine`
2. without a ticket, all requests of a group go out at once; with one, in this order:

                      ┌─ first token ─► the other requests go out, without ticket
    leader, ticket ───┼─ too late ────► closed ─┐
                      ├─ it failed ─────────────┴─► all choices are requested again, without ticket, once
                      └─ refused, or its server is lost: the group ends with that

3. each request has a connection: open ──► read, hand over, wait until the reader has taken it ──► read ... ──► end.
   Closing it ends the request there. It is closed when nobody listens to its children any more, unless all of them have
   finished: then the rest of the answer is read, so that the connection can be used again
4. a server that hangs keeps its connections open; its keeper calls `lost` when it finds it silent

Who frees what: the decode server owns a ticket from the moment it has taken the leader's request: it reads the KV or
tells prefill that nobody will, also if the connection is closed. Before that the group owns it, and gives it back when
the group or the leader ends. If the server is lost, it can do neither: then the owner of the group gives the ticket
back through another server.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from motet.engine import GroupStream
from motet.engines.http import QUESTION_TIMEOUT_S
from motet.engines.server_engine import ServerEngine
from motet.engines.vllm.requests import VLLMRequest, params_from, plain_ask, plan_asks, ticket_from, without_ticket
from motet.engines.vllm.vllm_server import VLLMServer
from motet.engines.vllm.vllm_wire import VLLMPiece, VLLMUsage
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, MotetError, RequestError, WorkerFaultError
from motet.ids import RequestId
from motet.metrics.routing import PullFallback, TicketEnd, TicketLog
from motet.metrics.stats import EngineStats
from motet.transfer.ticket import Ticket
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta, PromptReport, TokenLogprob

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
        """`leader_timeout_s`: longest time from the submission of a group with a ticket to its first token; after that
        the prompt is computed. `tickets`: shared by all engines of a gateway."""
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
                self.give_back(request.ticket, request.trace)
            raise
        self._groups[request.request_id] = group
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Returns a ticket. Cancelling it closes the connection, which frees the group there; a ticket that was on its
        way at that moment is lost, and its lease expires."""
        if readers > self.info.ticket_readers:
            raise RequestError(
                f"a ticket of {self._name} is for {self.info.ticket_readers} readers, not for {readers}: "
                "prefill once for each of the others"
            )
        made = await self._call(self._server.prefill(plain_ask(self._of_model(request))))
        first, *others = [ticket_from(params, engine_id=self.engine_id, prompt=request.prompt) for params in made]
        for ticket in others:
            self.give_back(ticket, request.trace)
        return first

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        """Lets this server tell prefill, since another engine may have made the ticket."""
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

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if (group := self._groups.get(request_id)) is not None:
            group.stop(index)

    async def stats(self) -> EngineStats:
        return (await self._call(self._server.report(timeout_s=QUESTION_TIMEOUT_S))).stats_of(self._name)

    def give_back(self, ticket: Ticket, trace: str) -> None:
        """Releases a ticket in a task, since nobody waits for it."""
        self._start(self.release(ticket, trace=trace))

    def _of_model(self, request: GenerateRequest) -> GenerateRequest:
        """Sets the model's name, which vLLM needs also if it has only one model."""
        return request if request.model else msgspec.structs.replace(request, model=self.info.model)


ChoicePiece = tuple[int, VLLMPiece]
"""A piece with the index of the choice that gets it."""


class Connection:
    """One request under way, with the choices that get its tokens. Owned by its group, which waits for `task`."""

    def __init__(self, server: VLLMServer, ask: VLLMRequest, *, group: "VLLMGroup", held: bool) -> None:
        """`held`: it stays open until its first token even if nobody listens."""
        self.opened = False
        """True once the server has the request."""
        self.begun = False
        """True once a token, or the end of a child, has come."""
        self._server = server
        self._ask = ask
        self._group = group
        self._held = held
        self._listening = {child: set(indices) for child, indices in enumerate(ask.choices) if indices}
        """The choices that get the tokens of each child that has not finished."""
        self._unfinished = set(range(len(ask.choices)))
        self.taken = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def mute(self, index: int) -> None:
        """Passes nothing more to this choice."""
        for child, listening in list(self._listening.items()):
            listening.discard(index)
            if not listening:
                del self._listening[child]
        self._close_if_unheard()

    async def _run(self) -> None:
        try:
            await self._read_all()
        except Exception as error:  # the group passes it to its reader, who raises it
            if self._listening or self._held:  # else nobody waits for it
                self._group.failed(self, error)

    async def _read_all(self) -> None:
        answer = await self._server.open(self._ask)
        try:
            self.opened = True
            while items := await answer.read():
                self.taken.clear()
                if self._hand_over(items):
                    await self.taken.wait()
            if left := sorted(index for listening in self._listening.values() for index in listening):
                raise EngineDiedError(f"{self._server.name} broke off before choices {left} ended")
            if self._held:
                raise EngineDiedError(f"{self._server.name} broke off before the first token")
        finally:
            answer.close()

    def _hand_over(self, items: list[VLLMPiece | VLLMUsage]) -> bool:
        """Returns True if more comes for a choice that must take this first."""
        pieces: list[ChoicePiece] = []
        usage: VLLMUsage | None = None
        for item in items:
            if isinstance(item, VLLMUsage):
                usage = item
                continue
            if not item.token_ids and item.finish is None:
                continue
            if item.index not in self._unfinished:
                raise WorkerFaultError(f"{self._server.name} sent tokens of choice {item.index}, which it has not open")
            self.begun = True
            pieces += [(index, item) for index in sorted(self._listening.get(item.index, ()))]
            if item.finish is not None:
                self._unfinished.discard(item.index)
                self._listening.pop(item.index, None)
        if self.begun:
            self._held = False
        self._group.brought(self, pieces, usage=usage)
        self._close_if_unheard()
        return bool(pieces and self._listening)

    def _close_if_unheard(self) -> None:
        if self._unfinished and not self._listening and not self._held:
            self.task.cancel()


class VLLMGroup:
    """A `GroupStream`. Its engine gives back a ticket that the server did not take, and removes an ended group."""

    def __init__(self, request: GenerateRequest, server: VLLMServer, *, engine: VLLMEngine) -> None:
        """Raises EngineError if it cannot be planned; then nothing has been sent."""
        self.request = request
        self._server = server
        self._engine = engine
        self._plan = plan_asks(request)
        self._ticket = request.ticket
        """The ticket while the group owns it, else None."""
        self._unfinished = {start.index for start in request.choices}
        """The choices that are unfinished for the reader."""
        self._connections: set[Connection] = set()
        self._leader: Connection | None = None
        """Set while the other requests wait for its first token."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[tuple[Connection, list[ChoicePiece], VLLMUsage | None]] = []
        self._news = asyncio.Event()
        self._cached_tokens: int | None = None
        self._prompt: tuple[TokenLogprob | None, ...] | None = None
        self._prompt_told = False
        self._error: Exception | None = None
        self._ended = False
        self._begin()

    async def settled(self) -> None:
        """Returns when no task of the group is left."""
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
        """Ends the group with `error`, after the deltas that have come before."""
        if not self._ended:
            self._error = error
            self._end()

    def stop(self, index: int) -> None:
        """Called when the reader ends this choice. If it has not been requested yet, it never will be."""
        self._unfinished.discard(index)
        if not self._unfinished:
            self._end()
        for connection in self._connections:
            connection.mute(index)

    def brought(self, connection: Connection, pieces: list[ChoicePiece], *, usage: VLLMUsage | None) -> None:
        """Takes what was read; the connection reads on when `connection.taken` is set."""
        self._ready.append((connection, pieces, usage))
        self._news.set()
        if connection is self._leader and connection.begun:
            self._follow()

    def failed(self, connection: Connection, error: Exception) -> None:
        """Called at most once, and last."""
        # Other kinds mean that the same would come again, or that the server died.
        if connection is self._leader and type(error) is EngineError:
            self._fall_back(connection, PullFallback.FAILED, why=error.message)
        elif connection in self._connections:
            self.fail(error)

    def _begin(self) -> None:
        if self._plan.prompt is not None:
            self._own(asyncio.create_task(self._ask_for_prompt(self._plan.prompt)))
        if self._plan.leader is not None:
            self._leader = self._connect(self._plan.leader, held=True)
            self._own(asyncio.create_task(self._give_up_leader()))
            return
        for ask in self._plan.rest:
            self._connect(ask)

    def _follow(self) -> None:
        assert self._plan.leader is not None and self.request.ticket is not None  # it is called only then
        self._cached_tokens = self.request.ticket.cached_tokens
        self._leader = None
        self._end_ticket(taken=True)
        self._ask_plainly(self._unfinished.difference(self._plan.leader.indices))

    def _fall_back(self, leader: Connection, reason: PullFallback, *, why: str) -> None:
        self._engine.tickets.pull_fallbacks[reason.value] += 1
        request = self.request
        fields = {"request_id": request.trace, "group": request.request_id, "reason": reason.value, "error": why}
        logger.warning("the KV of a prompt was not fetched; decode computes it", extra={"fields": fields})
        self._connections.discard(leader)
        leader.task.cancel()
        self._leader = None
        self._end_ticket(taken=False)  # a decode server that took it and failed does not tell prefill
        self._ask_plainly(self._unfinished, name="again")

    async def _give_up_leader(self) -> None:
        limit_s = self._engine.leader_timeout_s
        await self._engine.wait(limit_s)
        if self._leader is not None:
            self._fall_back(self._leader, PullFallback.LATE, why=f"no token within {limit_s:g} s")

    async def _ask_for_prompt(self, ask: VLLMRequest) -> None:
        try:
            self._prompt = await self._server.prompt_logprobs(ask)
        except Exception as error:  # handed to the reader, who raises it
            self.fail(error)
        self._news.set()

    def _ask_plainly(self, indices: Iterable[int], *, name: str = "") -> None:
        """Requests choices without a ticket. Plans again, since some choices may have been stopped."""
        for ask in plan_asks(without_ticket(self.request, indices, name=name)).rest:
            self._connect(ask)

    def _connect(self, ask: VLLMRequest, *, held: bool = False) -> Connection:
        connection = Connection(self._server, ask, group=self, held=held)
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
        """Returns all that has come as one delta. The first one waits for the log-probabilities of the prompt."""
        if self._plan.prompt is not None and self._prompt is None:
            return None
        ready, self._ready = self._ready, []
        written: dict[int, list[VLLMPiece]] = {}
        for connection, pieces, usage in ready:
            connection.taken.set()
            if self._cached_tokens is None and usage is not None:
                self._cached_tokens = usage.cached_tokens
            for index, piece in pieces:
                if index in self._unfinished:
                    written.setdefault(index, []).append(piece)
                    if piece.finish is not None:
                        self._unfinished.discard(index)
        choices = tuple(_joined(index, written[index]) for index in sorted(written))
        if not self._unfinished:
            self._end()
        if not choices:
            return None
        # vLLM reports cached tokens at the end of an answer: they are known here only if all of it came at once.
        report = None if self._prompt_told else PromptReport(self._cached_tokens or 0, self._prompt)
        self._prompt_told = True
        return GroupDelta(self.request.request_id, choices, report)

    def _end_ticket(self, *, taken: bool) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        if taken:
            self._engine.tickets.ended(ticket, TicketEnd.TAKEN)
        else:
            self._engine.give_back(ticket, self.request.trace)

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


def _joined(index: int, pieces: list[VLLMPiece]) -> ChoiceDelta:
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    known = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = tuple(logprob for some in known for logprob in some) if known else None
    return ChoiceDelta(index, token_ids, logprobs, pieces[-1].finish)
