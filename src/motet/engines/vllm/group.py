"""The stream of one group on a vLLM server: a few requests there, one stream here.

Without a ticket all requests go out at once. With one:

                      ┌─ first token ─► the other requests go out, without ticket
    leader, ticket ───┼─ too late ────► closed ─┐
                      ├─ it failed ─────────────┴─► all choices are asked for again, without ticket, once
                      └─ refused, or its server is lost: the group ends with that

Who frees what: a ticket is the decode server's from the moment it has taken the leader's request, for it reads the KV
or tells prefill that nobody will, also if the connection is closed. Before that it is the group's, and whatever ends
the group, or the leader, gives it back. If the server is lost it can neither read nor tell: then whoever handed the
ticket to the group gives it back through another one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass

from motet.engines.vllm.connection import Brought, Connection, Generating
from motet.engines.vllm.figures import PDFigures, PullFallback, TicketEnd
from motet.engines.vllm.plan import PlannedAsk, plan_asks, without_ticket
from motet.engines.vllm.wire import Piece
from motet.errors import EngineDiedError, EngineError
from motet.transfer.ticket import Ticket
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta, PromptReport, TokenLogprob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaderRules:
    """How long the others wait for the one with the ticket, and where it is counted that they did so for nothing."""

    timeout_s: float
    figures: PDFigures
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep


class VLLMGroup:
    """A `GroupStream`. `give_back` is called once if the server did not take the group's ticket; `over` once, when
    nothing of the group is left."""

    def __init__(
        self,
        request: GenerateRequest,
        server: Generating,
        rules: LeaderRules,
        *,
        give_back: Callable[[Ticket], None],
        over: Callable[["VLLMGroup"], None],
    ) -> None:
        """Raises EngineError if it cannot be planned; then nothing has been asked."""
        self.request = request
        self._server = server
        self._rules = rules
        self._give_back = give_back
        self._over = over
        self._plan = plan_asks(request)
        self._ticket = request.ticket
        """Until it is known what becomes of it."""
        self._taken = False
        """Whether the server has the request that the ticket is in."""
        self._unfinished = {start.index for start in request.choices}
        """As far as the reader knows."""
        self._connections: set[Connection] = set()
        self._leader: Connection | None = None
        """While the others wait for its first token."""
        self._lateness: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[tuple[Connection, Brought]] = []
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
        """Ends the group with `error`, behind what has come before."""
        if not self._ended:
            self._error = error
            self._end()

    def stop(self, index: int) -> None:
        """The reader ends this choice. What has not been asked for is not asked for any more."""
        self._unfinished.discard(index)
        if not self._unfinished:
            self._end()
        for connection in self._connections:
            connection.mute((index,))

    def opened(self, connection: Connection) -> None:
        if connection is self._leader:
            self._taken = True

    def brought(self, connection: Connection, brought: Brought) -> None:
        self._ready.append((connection, brought))
        self._news.set()
        if connection is self._leader and connection.begun:
            self._follow()

    def failed(self, connection: Connection, error: Exception) -> None:
        if (
            connection is self._leader and type(error) is EngineError
        ):  # the others say that it would come again, or died
            self._fall_back(PullFallback.FAILED, error.message)
        elif connection in self._connections:
            self.fail(error)

    def _begin(self) -> None:
        if self._plan.prompt is not None:
            self._start(self._ask_for_prompt())
        if self._plan.leader is None:
            self._ask(self._plan.rest)
            return
        self._leader = self._connect(self._plan.leader, held=True)
        self._lateness = self._start(self._give_up_leader())

    def _follow(self) -> None:
        """The KV is there."""
        assert self._plan.leader is not None and self.request.ticket is not None  # what it is called for
        self._cached_tokens = self.request.ticket.cached_tokens
        self._leader_no_more()
        self._settle_ticket()
        self._ask_plainly(self._unfinished.difference(self._plan.leader.indices))

    def _fall_back(self, reason: PullFallback, why: str) -> None:
        self._rules.figures.pull_fallbacks[reason.value] += 1
        fields = {
            "request_id": self.request.trace,
            "group": self.request.request_id,
            "reason": reason.value,
            "error": why,
        }
        logger.warning("the KV of a prompt was not fetched; decode computes it", extra={"fields": fields})
        if self._leader is not None:
            self._connections.discard(self._leader)
            self._leader.close()
        self._leader_no_more()
        self._give_back_ticket()
        self._ask_plainly(self._unfinished, name="again")

    def _leader_no_more(self) -> None:
        self._leader = None
        if self._lateness is not None:
            self._lateness.cancel()

    async def _give_up_leader(self) -> None:
        await self._rules.wait(self._rules.timeout_s)
        self._fall_back(PullFallback.LATE, f"no token within {self._rules.timeout_s:g} s")

    async def _ask_for_prompt(self) -> None:
        assert self._plan.prompt is not None  # what it is called for
        try:
            self._prompt = await self._server.prompt_logprobs(self._plan.prompt, trace=self.request.trace)
        except Exception as error:  # handed to the reader, who raises it
            self.fail(error)
        self._news.set()

    def _ask_plainly(self, indices: Iterable[int], *, name: str = "") -> None:
        """Planned anew, for some may have been stopped."""
        self._ask(plan_asks(without_ticket(self.request, indices, name=name)).rest)

    def _ask(self, asks: Iterable[PlannedAsk]) -> None:
        for planned in asks:
            self._connect(planned)

    def _connect(self, planned: PlannedAsk, *, held: bool = False) -> Connection:
        connection = Connection(self._server, planned, self.request, self, held=held)
        self._connections.add(connection)
        self._own(connection.task)
        return connection

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._own(task)
        return task

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._ended and not self._tasks:
            self._over(self)

    def _next(self) -> GroupDelta | None:
        """All that lies ready, as one delta. The first one waits for the log-probabilities of the prompt."""
        if self._plan.prompt is not None and self._prompt is None:
            return None
        ready, self._ready = self._ready, []
        written: dict[int, list[Piece]] = {}
        for connection, brought in ready:
            connection.taken()
            if self._cached_tokens is None and brought.usage is not None:
                self._cached_tokens = brought.usage.cached_tokens
            for index, piece in brought.pieces:
                if index in self._unfinished:
                    written.setdefault(index, []).append(piece)
                    if piece.finish is not None:
                        self._unfinished.discard(index)
        choices = tuple(_joined(index, written[index]) for index in sorted(written))
        if not self._unfinished:
            self._end()
        return GroupDelta(self.request.request_id, choices, self._report()) if choices else None

    def _report(self) -> PromptReport | None:
        """On the first delta. Of cached tokens vLLM tells at the end of an answer, so they are known only where all of
        it came at once, and never of a prompt that was fetched: its ticket does not tell."""
        if self._prompt_told:
            return None
        self._prompt_told = True
        return PromptReport(self._cached_tokens or 0, self._prompt)

    def _settle_ticket(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is None or isinstance(self._error, EngineDiedError):
            return
        if self._taken:
            self._rules.figures.ended(ticket, TicketEnd.TAKEN)
        else:
            self._give_back(ticket)

    def _give_back_ticket(self) -> None:
        """A decode server that took it and failed tells nobody."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._give_back(ticket)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for task in self._tasks:
            task.cancel()
        self._settle_ticket()
        self._news.set()
        if not self._tasks:
            self._over(self)


def _joined(index: int, pieces: list[Piece]) -> ChoiceDelta:
    """What several pieces add to a choice."""
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    known = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = tuple(logprob for some in known for logprob in some) if known else None
    return ChoiceDelta(index, token_ids, logprobs, pieces[-1].finish)
