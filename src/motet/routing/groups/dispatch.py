"""Gives groups to the workers of a fleet: it decides on prefill, picks workers, and keeps the books of each.

asks_prefill   decides if prefill pays for a group (`plan.bypass_reason`)
ticket         gets the prompt's KV from the prefill worker that will have it first; None: decode must compute it
give           gives the choices to the worker that `choose` picks, and returns a `Placement`
give_back      returns a ticket that nobody will read to a worker that can end its lease
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import count

from motet.engine import ANSWERING, GroupStream, Worker, WorkerState
from motet.errors import (
    EngineClosedError,
    EngineDiedError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    RequestError,
    WorkerFaultError,
)
from motet.ids import ModelName
from motet.metrics.routing import RoutingFigures, TicketLog
from motet.routing.choosing.choose import choose
from motet.routing.choosing.cost import WorkKind
from motet.routing.choosing.prefill_plan import BypassReason, SplitFacts, bypass_reason, plan_parts, reason_of
from motet.routing.choosing.survey import releaser, survey, trunk_of
from motet.routing.groups.migration import Unfinished
from motet.routing.groups.prompt_turns import PromptTurn, PromptTurns
from motet.routing.groups.response_check import ResponseCheck
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Load, Member, PromptReading
from motet.settings.server_config import CellConfig, RoutingConfig
from motet.tracing.spans import NO_SPAN, NO_TRACES, Attributes, ChildSpan, Span, SpanKind, Tracer
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta, PromptReport

logger = logging.getLogger(__name__)


class Placement:
    """The choices of a group, or of a part of it, on one worker: their stream, and their entries in its books."""

    def __init__(
        self, chosen: "ChosenWorker", fleet: Fleet, *, request: GenerateRequest, unfinished: Unfinished, tracer: Tracer
    ) -> None:
        """Raises what the worker's engine raises."""
        self.member = member = chosen.member
        self.worker = worker = chosen.worker
        self._span = work_span("decode", chosen, request=request, tracer=tracer)
        self.request = request = self._span.placed(request)
        self.begun = False
        """True once the first delta has come, so the prompt has been computed or fetched."""
        self.evicted: MotetError | None = None
        try:
            self.stream: GroupStream = worker.engine.generate(request)
        except MotetError as error:
            self._span.fail(error)
            raise
        self._unfinished = unfinished
        self._choices = unfinished.choices
        self.word = None if worker.local else ResponseCheck(request, vocab_size=worker.engine.info.vocab_size)
        """What a worker elsewhere has promised."""
        self._waits = False
        """True while the reader waits for such a worker."""
        self._silent_looks = 0
        self._fleet = fleet
        self._open = True
        self._block_size = worker.engine.info.block_size
        self._books = member.books
        self._trunk = trunk_of(request, fleet, member=member)
        self._books.open_choices += len(unfinished)
        fleet.hold(member, self._trunk)
        for choice in self._choices.values():
            choice.placed(self._block_size)
            self._books.tail_blocks += choice.tail_blocks
        self._reading: PromptReading | None = self._books.give(0 if request.ticket else chosen.load.own_tokens)
        member.groups.add(self)

    def take(self, delta: GroupDelta) -> None:
        """Books the tokens and ends of a delta."""
        self.member.stirred = True
        if self._reading is not None:
            self.begun = True
            cached_tokens = delta.prompt.cached_tokens if delta.prompt else 0
            self._note_prompt(delta.prompt)
            computed_tokens = 0 if self.request.ticket else len(self.request.prompt) - cached_tokens
            self._books.done(self._reading, computed_tokens=computed_tokens)
            self._reading = None
        for told in delta.choices:
            choice = self._choices.get(told.index)
            if choice is None:
                continue
            if told.finish is not None:
                self.drop(told.index)
                continue
            choice.output += told.token_ids
            if len(choice.output) > choice.room:
                before = choice.tail_blocks
                choice.placed(self._block_size)
                if self._open:
                    self._books.tail_blocks += choice.tail_blocks - before

    def _note_prompt(self, report: PromptReport | None) -> None:
        """Notes for the trace that the first tokens have come, and how the KV of the prompt came here. A worker
        elsewhere notes that itself."""
        self._span.event("first_delta")
        pull = None if report is None or not self.worker.local else report.pull
        if pull is not None:
            told: Attributes = {"motet.worker": self.member.id, "motet.transfer.bytes": pull.num_bytes}
            self._span.add(ChildSpan("transfer", pull.start_ns, pull.end_ns, told, error=pull.failure))

    def drop(self, index: int) -> None:
        """Takes a choice that has finished or was stopped out of the books."""
        choice = self._choices.pop(index, None)
        if choice is None or not self._open:
            return
        self._books.open_choices -= 1
        self._books.tail_blocks -= choice.tail_blocks
        if self._unfinished:
            self._fleet.notify_room()
        else:
            self.close_books()

    def close_books(self, error: MotetError | None = None) -> None:
        """Takes the group out of the books: this worker sends nothing more of it. A second call changes nothing.
        `error`: why it sends nothing more, unless it has written all."""
        if not self._open:
            return
        self._open = False
        self._span.fail(error)
        books = self._books
        books.open_choices -= len(self._unfinished)
        books.tail_blocks -= sum(choice.tail_blocks for choice in self._choices.values())
        self._fleet.let_go(self.member, self._trunk, books=books)
        if self._reading is not None:
            books.drop(self._reading)
            self._reading = None
        self.member.groups.discard(self)
        self._fleet.notify()

    async def checked(self, word: ResponseCheck) -> GroupDelta:
        """Returns the next delta, which keeps to `word`. Raises MotetErrors of the stream, or WorkerFaultError."""
        self._waits = True
        try:
            delta = await self.stream.__anext__()
            self._silent_looks = 0
            word.check(delta)
        except (MotetError, StopAsyncIteration):
            raise
        except Exception as error:
            logger.exception("an answer of %s could not be taken", self.member.id)
            raise WorkerFaultError(
                f"its answer could not be taken ({type(error).__name__}): the log has more"
            ) from error
        finally:
            self._waits = False
        return delta

    def look(self) -> int:
        self._silent_looks += self._waits
        return self._silent_looks

    def renewed(self, model_digest: str) -> None:
        """Notes the weights with which the choices go on."""
        if self._unfinished.model_digest:
            self._unfinished.model_digest = model_digest

    async def evict(self, error: MotetError) -> None:
        """Ends the stream as if it had raised `error`."""
        if self._open and self.evicted is None:
            self.evicted = error
            await self.stream.aclose()


class HeldTicket:
    """A ticket with the number of parts of its group that may still read it. A lease waits for all its readers, so if
    some part did not read the ticket, it is given back as soon as no part needs it any more."""

    def __init__(
        self, ticket: Ticket, dispatcher: "Dispatcher", *, parts: int, trace: str = "", ours: bool = True
    ) -> None:
        """`ours`: a prefill worker granted it to this router; else a client brought it. A client's ticket is given back
        only if no engine has had it: an engine notifies the lease itself, which may have other readers."""
        self.ticket = ticket
        self.ours = ours
        self._dispatcher = dispatcher
        self._trace = trace
        self._unsettled = parts
        self._unread = max(ticket.readers, parts) if ours else 1
        self._releasing: asyncio.Task[None] | None = None

    def settled(self, *, read: bool) -> None:
        """A part does not need the ticket any more. Must be called once for each part."""
        self._unsettled -= 1
        self._unread -= read
        if not self._unsettled and self._unread:
            self._releasing = self._dispatcher.give_back(self.ticket, self._trace)

    async def released(self) -> None:
        """Returns when the ticket has been given back, if that was necessary."""
        if self._releasing is not None:
            await asyncio.wait((self._releasing,))


class Dispatcher:
    """Gives the groups of one router to the members of its fleet."""

    def __init__(
        self,
        fleet: Fleet,
        figures: RoutingFigures,
        *,
        routing: RoutingConfig,
        cell: CellConfig,
        tickets: TicketLog | None,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        """`tickets`: counts tickets that no worker is there to give back to."""
        self.fleet = fleet
        self.tracer = tracer
        self._routing = routing
        self._cell = cell
        self.on_the_way: set[Unfinished] = set()
        """The groups that prefill workers are computing: they are in no decode worker's books yet."""
        self._prompt_turns = PromptTurns()
        self._figures = figures
        self._figures.bypasses.update({reason.value: 0 for reason in BypassReason})
        self._tickets = tickets
        self._turns = {work: count() for work in WorkKind}
        self._releasing: set[asyncio.Task[None]] = set()

    def choices_on_the_way(self, model: ModelName) -> int:
        """Number of choices of groups for this model that are being prefilled."""
        return sum(len(group) for group in self.on_the_way if group.model == model)

    def asks_prefill(self, request: GenerateRequest) -> bool:
        """Returns True if a prefill worker should compute the prompt. Raises NoWorkerError if nobody can decode now."""
        if not (self._cell.prefill_may_come or self.fleet.serving(request.model).has_prefill):
            if not self.fleet.ready(WorkKind.GENERATE, request.model):
                raise self.none_up(WorkKind.GENERATE, request.model)
            return False
        decode = self.load(WorkKind.GENERATE, request)
        if decode is None:
            raise self.none_up(WorkKind.GENERATE, request.model, model_digest=request.model_digest)
        reason = bypass_reason(
            self._cell.bypass_tokens,
            prompt_tokens=len(request.prompt),
            prompt_logprobs=request.sampling.prompt_logprobs is not None,
            prefill=self.load(WorkKind.PREFILL, request),
            decode=decode,
        )
        if reason is not None:
            self._figures.bypasses[reason.value] += 1
        return reason is None

    def load(self, work: WorkKind, request: GenerateRequest) -> Load | None:
        """Returns the prompt tokens ahead of the group on the worker that would get it now. Returns None if there is no
        worker, or, for prefill, none whose KV a decode worker could fetch."""
        chosen = self._next(work, request)
        return None if chosen is None else chosen.load

    def plan(self, request: GenerateRequest, *, apart: bool) -> list[int]:
        """Returns the number of choices of each part of the group; with one part it stays whole. `apart`: its prompt is
        prefilled first, so there can be no more parts than its ticket may have readers.

        Greedy groups stay whole, since their choices are computed once, and so do groups with a client's ticket, which
        has one reader."""
        choices, spread_choices = len(request.choices), self._routing.spread_choices
        if not 0 < spread_choices < choices or request.sampling.greedy or request.ticket is not None:
            return [choices]
        serving = self.fleet.serving(request.model)
        levels = sorted(member.open_choices for member in serving.ready(WorkKind.GENERATE))
        plan = plan_parts(
            SplitFacts(choices, len(request.prompt), request.sampling.max_tokens, ticket=apart),
            levels[: serving.ticket_readers] if apart else levels,
            spread_choices=spread_choices,
        )
        self._figures.spreads += len(plan) > 1
        return plan

    def prefill_turn(self, request: GenerateRequest, *, parts: int) -> AbstractAsyncContextManager[PromptTurn]:
        """Waits until no other group with this prompt is being prefilled, and keeps them waiting while the context
        lasts. Nobody waits where decode cannot share a prompt, or prefill must be asked for each group, as it must for
        one of several parts."""
        if parts == 1 and self._cell.bypass_tokens and self.fleet.serving(request.model).shares_prompts:
            return self._prompt_turns.turn(request)
        return nullcontext(PromptTurn())

    async def ticket(self, request: GenerateRequest, *, readers: int = 1) -> Ticket | None:
        """Returns None if prefill failed, which is counted and logged. Raises RequestError for the client's errors."""
        timeout_s = self._cell.prefill_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self.prefill(request, readers=readers)
        except RequestError:
            raise
        except TimeoutError:
            reason, why = BypassReason.PREFILL_LATE, f"no answer within {timeout_s:g} s"
        except MotetError as error:
            reason, why = reason_of(error), error.message
        fields = {"request_id": request.trace, "group": request.request_id, "reason": reason, "error": why}
        logger.warning("prefill failed; decode computes the prompt", extra={"fields": fields})
        self._figures.bypasses[reason.value] += 1
        return None

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Asks the prefill worker that would finish the prompt first; if it dies, or takes no more, the next one."""
        failures: list[MotetError] = []
        tried: list[str] = []
        while (chosen := self._next(WorkKind.PREFILL, request, besides=tried, decided=True)) is not None:
            tried.append(chosen.member.id)
            try:
                return await self._prefill_on(chosen, request, readers=readers)
            except (EngineDiedError, OverloadedError) as error:
                self.failed(chosen.member, chosen.worker, error=error)
                failures.append(error)
            except EngineClosedError as error:  # it is just leaving
                failures.append(error)
        full = [error for error in failures if isinstance(error, OverloadedError)]
        raise (full or failures or [self.none_up(WorkKind.PREFILL, request.model, model_digest=request.model_digest)])[
            -1
        ]

    def give(self, request: GenerateRequest, unfinished: Unfinished) -> Placement:
        """Gives the group to a worker. Raises NoWorkerError, or what that worker's engine raises."""
        chosen = self._next(WorkKind.GENERATE, request, decided=True)
        if chosen is None:
            raise self.none_up(WorkKind.GENERATE, request.model, model_digest=request.model_digest)
        try:
            stay = Placement(chosen, self.fleet, request=request, unfinished=unfinished, tracer=self.tracer)
        except (EngineDiedError, OverloadedError) as error:
            self.failed(chosen.member, chosen.worker, error=error)
            raise
        self.fleet.sessions[WorkKind.GENERATE].keep(request.session_id, chosen.member.id)
        self._figures.routed_tokens += len(request.prompt)
        self._figures.overlap_tokens += len(request.prompt) - chosen.load.own_tokens
        return stay

    def failed(self, member: Member, worker: Worker, *, error: MotetError) -> None:
        """Notes that a worker died or took no more; ignores errors of an earlier start of it."""
        if member.worker is not worker or self.fleet.get(member.id) is not member:
            return
        if isinstance(error, OverloadedError):
            member.refuse()
        elif isinstance(error, WorkerFaultError):
            self.fleet.distrust(member.id, why=error.message)
        elif member.state in ANSWERING:  # else its keeper knows better
            self.fleet.mark(member.id, WorkerState.DEAD, why=error.message)

    async def release(self, ticket: Ticket, trace: str = "") -> None:
        worker = releaser(ticket, self.fleet)
        if worker is not None:
            await worker.engine.release(ticket, trace=trace)
        else:
            if self._tickets is not None:
                self._tickets.left(ticket)
            logger.info("nobody can give back the ticket of %s: its lease ends by itself", ticket.remote_request_id)

    def give_back(self, ticket: Ticket, trace: str) -> asyncio.Task[None]:
        """Releases a ticket in a task of its own; `settle` waits for it."""
        releasing = asyncio.create_task(self.release(ticket, trace))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)
        return releasing

    async def settle(self) -> None:
        """Returns when all tickets on their way back have been given back."""
        await asyncio.gather(*self._releasing)

    def none_up(self, work: WorkKind, model: str = "", *, model_digest: str = "") -> NoWorkerError:
        members = [member for member in self.fleet.members if not member.text and member.may_have(model)]
        known = ", ".join(
            f"{member.id} is {member.state}"
            + (" with other weights" if model_digest and not member.may_go_on(model_digest) else "")
            for member in members
        )
        return NoWorkerError(f"no worker can {work.name.lower()} now: {known or 'there is none'}")

    def check(self) -> None:
        """Raises unless every group has ended and the books are empty."""
        if self.on_the_way:
            raise AssertionError(f"{len(self.on_the_way)} groups are being prefilled")
        self._prompt_turns.check()
        if self._releasing:
            raise AssertionError(f"{len(self._releasing)} tickets are being given back")
        self.fleet.check()

    async def _prefill_on(self, chosen: "ChosenWorker", request: GenerateRequest, *, readers: int) -> Ticket:
        member, books, engine = chosen.member, chosen.member.books, chosen.worker.engine
        trunk = trunk_of(request, self.fleet, member=member)
        self.fleet.hold(member, trunk)
        reading = books.give(chosen.load.own_tokens)
        span = work_span("prefill", chosen, request=request, tracer=self.tracer)
        try:
            ticket = await engine.prefill(span.placed(request), readers=min(readers, engine.info.ticket_readers))
        except BaseException as error:
            books.drop(reading)
            span.fail(error)
            raise
        finally:
            self.fleet.let_go(member, trunk, books=books)
        span.note({"motet.prompt.tokens": ticket.num_tokens, "motet.prompt.cached_tokens": ticket.cached_tokens})
        span.end()
        books.done(reading, computed_tokens=ticket.num_tokens - ticket.cached_tokens)
        self.fleet.sessions[WorkKind.PREFILL].keep(request.session_id, chosen.member.id)
        return ticket

    def _next(
        self, work: WorkKind, request: GenerateRequest, *, besides: Sequence[str] = (), decided: bool = False
    ) -> "ChosenWorker | None":
        """Returns the worker that would get the group now, or None. `decided`: it gets it, so the reason is kept."""
        turn = next(self._turns[work]) if decided else 0
        seen = survey(self.fleet, work, request=request, besides=besides, turn=turn)
        decision = seen and choose(seen.candidates, seen.needs, policy=self._routing.routing_policy, turn=turn)
        if not seen or not decision:
            return None
        member, worker = seen.present[decision.place]
        if decided:
            self._figures.decisions[decision.reason] += 1
            member.last_decision = decision.why
            logger.debug("group %s goes to %s: %s", request.request_id, member.id, decision.why)
        return ChosenWorker(member, worker, seen.load(decision.place))


@dataclass(frozen=True, slots=True)
class ChosenWorker:
    """The worker for a group, and the prompt tokens that it must compute until the group's prompt is done."""

    member: Member
    worker: Worker
    load: Load


def work_span(name: str, chosen: ChosenWorker, *, request: GenerateRequest, tracer: Tracer) -> Span:
    """Begins the span of a worker's work for a group, in the span that the group is a part of."""
    parent = tracer.of(request.traceparent)
    if parent is NO_SPAN:
        return NO_SPAN
    return parent.child(
        name,
        {"motet.worker": chosen.member.id, "motet.choices": len(request.choices), "motet.part": request.request_id},
        kind=SpanKind.INTERNAL if chosen.worker.local else SpanKind.CLIENT,
    )
