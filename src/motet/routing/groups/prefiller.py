"""Prefills prompts on prefill workers: decides whether that pays, gets the tickets, and keeps them until a group has
parts.

1. `pays`     decides by the backlogs of both sides (`prefill_plan.bypass_reason`)
2. `turn`     makes groups with the same prompt take turns, if prefill and decode are separate
3. `ticket`   sends the prompt to the prefill worker that will finish it first. Without a ticket, decode computes the
              prompt

Of several groups with the same prompt, the first one is prefilled while the others wait. When a decode worker has the
prompt, the next group chooses a worker. On the same worker it shares the prompt without prefill or transfer, and so do
the groups after it. If that worker has no capacity, another decode worker fetches the prompt, with one more transfer
of the blocks that the prefill worker has cached. If prefill fails, no group waits any more, so a worker that hangs
delays each group only once.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from motet.errors import EngineClosedError, EngineDiedError, MotetError, NoWorkerError, OverloadedError, RequestError
from motet.ids import ModelName
from motet.metrics.routing import RoutingFigures
from motet.routing.choosing.prefill_plan import BypassReason, bypass_reason, reason_of
from motet.routing.choosing.survey import trunk_of
from motet.routing.groups.chooser import ChosenWorker, WorkerChooser, work_span
from motet.routing.groups.tickets import HeldTicket, TicketReleases
from motet.routing.groups.unfinished import Unfinished
from motet.routing.workers.serving import WorkKind
from motet.settings.server_config import CellConfig
from motet.tracing.spans import Tracer
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest

logger = logging.getLogger(__name__)

PromptKey = tuple[ModelName, str, str, tuple[int, ...]]
"""Model, weights, salt and tokens."""
Place = Callable[[list[int]], None]
"""Places the choices of the group, in parts of these sizes."""


@dataclass
class PromptTurn:
    """The turns of the groups of one prompt."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    groups: int = 0
    """Number of groups that have their turn, or wait for it."""
    failed: bool = False
    """True if the prefill of one group failed. From then on no group waits for another one."""


class Prefiller:
    """Prefills the prompts of one router's groups."""

    def __init__(self, chooser: WorkerChooser, figures: RoutingFigures, *, cell: CellConfig, tracer: Tracer) -> None:
        self.in_progress: set[Unfinished] = set()
        """The groups that are being prefilled: they are not in the load of any decode worker yet."""
        self._chooser = chooser
        self._fleet = chooser.fleet
        self._figures = figures
        self._figures.bypasses.update({reason.value: 0 for reason in BypassReason})
        self._cell = cell
        self._tracer = tracer
        self._turns: dict[PromptKey, PromptTurn] = {}
        """The turns by prompt, for prompts that have a group now."""

    def choices_in_progress(self, model: ModelName) -> int:
        return sum(len(group) for group in self.in_progress if group.request.model == model)

    def choices_by_client(self) -> Counter[str]:
        """Returns the number of choices in progress of each client that has any."""
        choices = Counter[str]()
        for group in self.in_progress:
            choices[group.request.client] += len(group)
        return choices

    def pays(self, request: GenerateRequest) -> bool:
        """Returns True if a prefill worker should compute the prompt. Counts the bypass otherwise. Raises NoWorkerError
        if no worker can decode now."""
        chooser, model = self._chooser, request.model
        if not (self._cell.prefill_may_come or self._fleet.catalog.serving(model).has_prefill):
            if not self._fleet.catalog.ready(model):
                raise chooser.none_available(WorkKind.GENERATE, model)
            return False
        decode = chooser.backlog(WorkKind.GENERATE, request)
        if decode is None:
            raise chooser.none_available(WorkKind.GENERATE, model, model_digest=request.model_digest)
        reason = bypass_reason(
            self._cell.bypass_tokens,
            prompt_tokens=len(request.prompt),
            prompt_logprobs=request.sampling.prompt_logprobs is not None,
            prefill=chooser.backlog(WorkKind.PREFILL, request),
            decode=decode,
        )
        if reason is not None:
            self._figures.bypasses[reason.value] += 1
        return reason is None

    @asynccontextmanager
    async def turn(self, request: GenerateRequest, *, parts: int) -> AsyncIterator[PromptTurn]:
        """Waits until no other group with this prompt is being prefilled, and makes such groups wait until the context
        is left. A group does not wait if decode workers cannot share a prompt, or if every group needs a prefill of its
        own, which includes groups of several parts."""
        shares_prompts = self._fleet.catalog.serving(request.model).shares_prompts
        if parts > 1 or not self._cell.bypass_tokens or not shares_prompts:
            yield PromptTurn()
            return
        key = request.model, request.model_digest, request.cache_salt, request.prompt
        turn = self._turns.setdefault(key, PromptTurn())
        turn.groups += 1
        try:
            async with turn.lock:
                if not turn.failed:
                    yield turn
                    return
            yield turn
        finally:
            turn.groups -= 1
            if not turn.groups:
                del self._turns[key]

    def maker_of(self, ticket: Ticket) -> str:
        """Returns the id of the worker that made a ticket; empty if it has left."""
        maker = self._fleet.catalog.maker(ticket.remote_engine_id)
        return "" if maker is None else maker.id

    async def ticket(self, request: GenerateRequest, *, readers: int = 1) -> Ticket | None:
        """Returns the ticket of a prefill, or None if the prefill failed; failures are counted and logged. Raises
        RequestError for errors of the client."""
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
        """Prefills on the worker that would finish first, and on the next one if that one dies or refuses."""
        failures: list[MotetError] = []
        tried: list[str] = []
        while (chosen := self._chooser.choose(WorkKind.PREFILL, request, excluding=tried)) is not None:
            tried.append(chosen.member.id)
            try:
                return await self._prefill_on(chosen, request, readers=readers)
            except RequestError:
                raise
            except MotetError as error:
                if isinstance(error, EngineDiedError | OverloadedError):
                    self._chooser.record_failure(chosen.member, chosen.worker, error=error)
                failed = error.of_worker(chosen.member.id, remote=not chosen.worker.local)
                if not isinstance(error, EngineDiedError | OverloadedError | EngineClosedError):
                    raise failed from error
                failures.append(failed)  # a worker whose engine is closed is leaving
        refusals = [error for error in failures if isinstance(error, OverloadedError)]
        if last := (refusals or failures)[-1:]:
            raise last[0]
        raise self._chooser.none_available(WorkKind.PREFILL, request.model, model_digest=request.model_digest)

    def check(self) -> None:
        """Raises AssertionError if a group is being prefilled."""
        if self.in_progress:
            raise AssertionError(f"{len(self.in_progress)} groups are being prefilled")
        if self._turns:
            raise AssertionError(f"groups of {len(self._turns)} prompts wait for their turn")

    async def _prefill_on(self, chosen: ChosenWorker, request: GenerateRequest, *, readers: int) -> Ticket:
        member, load, engine = chosen.member, chosen.member.load, chosen.worker.engine
        trunk = trunk_of(request, self._fleet, member=member)
        load.add_trunk(trunk)
        prompt = load.prompts.add(chosen.backlog.own_tokens)
        span = work_span("prefill", chosen, request=request, tracer=self._tracer)
        try:
            ticket = await engine.prefill(span.placed(request), readers=min(readers, engine.info.ticket_readers))
        except BaseException as error:
            load.prompts.remove(prompt)
            span.fail(error)
            raise
        finally:
            load.remove_trunk(trunk)
        span.note({"motet.prompt.tokens": ticket.num_tokens, "motet.prompt.cached_tokens": ticket.cached_tokens})
        span.end()
        load.prompts.finish(prompt, computed_tokens=ticket.num_tokens - ticket.cached_tokens)
        self._fleet.sessions[WorkKind.PREFILL].record(request.session_id, member.id)
        return ticket


class GroupPrefill:
    """The ticket of one group until its parts own it, and the task that waits for prefill. The client sent the ticket,
    or a prefill worker grants it."""

    def __init__(self, unfinished: Unfinished, prefiller: Prefiller, *, releases: TicketReleases) -> None:
        self._unfinished = unfinished
        self._prefiller = prefiller
        self._releases = releases
        self._task: asyncio.Task[None] | None = None
        request = unfinished.request
        self._held: HeldTicket | None = None
        if request.ticket is not None:
            self._held = HeldTicket(request.ticket, releases, parts=1, trace=request.trace, from_client=True)

    def pays(self) -> bool:
        """Returns True if a prefill worker should compute the prompt. Raises NoWorkerError if no worker can decode."""
        return self._held is None and self._prefiller.pays(self._unfinished.remaining_request(0))

    def start(self, sizes: list[int], *, place: Place, fail: Callable[[Exception], None]) -> None:
        """Starts a task that gets a ticket and then calls `place`. `fail`: called with any error of the task."""
        self._prefiller.in_progress.add(self._unfinished)
        self._task = asyncio.create_task(self._run(sizes, place=place, fail=fail))

    def take(self) -> HeldTicket | None:
        """Returns the ticket, which the parts of the group own from then on."""
        held, self._held = self._held, None
        return held

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Waits until the task has ended. Releases a ticket that the parts have not taken."""
        try:
            if self._task is not None:
                await asyncio.wait((self._task,))
            if (held := self.take()) is not None:
                held.release()
                await held.wait_released()
        finally:
            self._prefiller.in_progress.discard(self._unfinished)

    async def _run(self, sizes: list[int], *, place: Place, fail: Callable[[Exception], None]) -> None:
        try:
            async with self._prefiller.turn(self._unfinished.request, parts=len(sizes)) as turn:
                if len(sizes) > 1 or not self._prompt_has_arrived():
                    sizes = await self._get_ticket(sizes)
                    turn.failed = self._held is None
                self._prefiller.in_progress.discard(self._unfinished)
                place(sizes)
        except Exception as error:  # the reader of the group raises it
            fail(error)

    def _prompt_has_arrived(self) -> bool:
        """Returns True if the decode worker that would get the group has the prompt by now, from another group."""
        with suppress(NoWorkerError):
            return not self._prefiller.pays(self._unfinished.remaining_request(0))
        return False

    async def _get_ticket(self, sizes: list[int]) -> list[int]:
        """Gets a ticket, and returns the sizes of the parts that can use it. Without a ticket every part would compute
        the prompt, so the group gets one part."""
        request = self._unfinished.request
        ticket = await self._prefiller.ticket(request, readers=len(sizes))
        if ticket is None or ticket.readers < len(sizes):
            sizes = [len(self._unfinished)]
        if ticket is not None:
            self._held = HeldTicket(ticket, self._releases, parts=len(sizes), trace=request.trace)
            self._unfinished.prompt.prefill_worker = self._prefiller.maker_of(ticket)
        return sizes
