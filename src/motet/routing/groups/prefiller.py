"""Prefills prompts on prefill workers: decides whether that pays, and gets the tickets.

1. `pays`     decides by the backlogs of both sides (`prefill_plan.bypass_reason`)
2. `turn`     makes groups with the same prompt take turns (`prompt_turns`)
3. `ticket`   sends the prompt to the prefill worker that will finish it first. Without a ticket, decode computes the
              prompt
"""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, nullcontext

from motet.errors import EngineClosedError, EngineDiedError, MotetError, OverloadedError, RequestError
from motet.ids import ModelName
from motet.metrics.routing import RoutingFigures
from motet.routing.choosing.prefill_plan import BypassReason, bypass_reason, reason_of
from motet.routing.choosing.survey import trunk_of
from motet.routing.groups.chooser import ChosenWorker, WorkerChooser, work_span
from motet.routing.groups.prompt_turns import PromptTurn, PromptTurns
from motet.routing.groups.unfinished import Unfinished
from motet.routing.workers.serving import WorkKind
from motet.settings.server_config import CellConfig
from motet.tracing.spans import Tracer
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest

logger = logging.getLogger(__name__)


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
        self._turns = PromptTurns()

    def choices_in_progress(self, model: ModelName) -> int:
        """Returns the number of choices of groups for this model that are being prefilled."""
        return sum(len(group) for group in self.in_progress if group.request.model == model)

    def pays(self, request: GenerateRequest) -> bool:
        """Returns True if a prefill worker should compute the prompt. Counts the bypass otherwise. Raises NoWorkerError
        if no worker can decode now."""
        chooser, model = self._chooser, request.model
        if not (self._cell.prefill_may_come or self._fleet.catalog.serving(model).has_prefill):
            if not self._fleet.catalog.ready(WorkKind.GENERATE, model):
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

    def turn(self, request: GenerateRequest, *, parts: int) -> AbstractAsyncContextManager[PromptTurn]:
        """Waits until no other group with this prompt is being prefilled, and makes such groups wait until the context
        is left. A group does not wait if decode workers cannot share a prompt, or if every group needs a prefill of its
        own, which includes groups of several parts."""
        if parts == 1 and self._cell.bypass_tokens and self._fleet.catalog.serving(request.model).shares_prompts:
            return self._turns.turn(request)
        return nullcontext(PromptTurn())

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
        """Sends the prompt to the prefill worker that would finish it first, and to the next worker if that one dies or
        refuses the prompt."""
        failures: list[MotetError] = []
        tried: list[str] = []
        while (chosen := self._chooser.choose(WorkKind.PREFILL, request, excluding=tried)) is not None:
            tried.append(chosen.member.id)
            try:
                return await self._prefill_on(chosen, request, readers=readers)
            except (EngineDiedError, OverloadedError) as error:
                self._chooser.record_failure(chosen.member, chosen.worker, error=error)
                failures.append(error)
            except EngineClosedError as error:  # the worker is leaving
                failures.append(error)
        refusals = [error for error in failures if isinstance(error, OverloadedError)]
        if last := (refusals or failures)[-1:]:
            raise last[0]
        raise self._chooser.none_available(WorkKind.PREFILL, request.model, model_digest=request.model_digest)

    def check(self) -> None:
        """Raises AssertionError if a group is being prefilled."""
        if self.in_progress:
            raise AssertionError(f"{len(self.in_progress)} groups are being prefilled")
        self._turns.check()

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
