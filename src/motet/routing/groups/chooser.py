"""Chooses the worker for each group and each prefill, and records which workers failed."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from motet.engine import ANSWERING, Worker, WorkerState
from motet.errors import EngineClosedError, MotetError, NoWorkerError, OverloadedError, WorkerFaultError
from motet.metrics.routing import RoutingFigures
from motet.routing.choosing.choose import choose
from motet.routing.choosing.survey import survey
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.routing.workers.serving import WorkKind
from motet.routing.workers.worker_load import PromptBacklog
from motet.settings.server_config import Policy
from motet.tracing.spans import NO_SPAN, Span, SpanKind, Tracer
from motet.types import GenerateRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenWorker:
    """The worker for a group, and the prompt tokens that it must compute until the group's prompt is done."""

    member: Member
    worker: Worker
    backlog: PromptBacklog


class WorkerChooser:
    """Chooses among the members of a fleet by one policy."""

    def __init__(self, fleet: Fleet, figures: RoutingFigures, *, policy: Policy) -> None:
        self.fleet = fleet
        self._figures = figures
        self._policy = policy
        self._turns = {work: count() for work in WorkKind}

    def choose(self, work: WorkKind, request: GenerateRequest, *, excluding: Sequence[str] = ()) -> ChosenWorker | None:
        """Returns the worker that gets the group, or None if no worker can. `excluding`: ids of workers left out."""
        return self._choose(work, request, excluding=excluding, decided=True)

    def backlog(self, work: WorkKind, request: GenerateRequest) -> PromptBacklog | None:
        """Returns the prompt backlog of the worker that would get the group now. Returns None if no worker would or,
        for prefill, if a decode worker could fetch the KV of none."""
        chosen = self._choose(work, request, excluding=(), decided=False)
        return None if chosen is None else chosen.backlog

    def record_failure(self, member: Member, worker: Worker, *, error: MotetError) -> None:
        """Records that a worker died or refused a group. Ignores errors of an earlier start of the worker."""
        if member.worker is not worker or self.fleet.get(member.id) is not member:
            return
        if isinstance(error, OverloadedError):
            member.faults.record_refusal()
        elif isinstance(error, WorkerFaultError):
            self.fleet.distrust(member.id, why=error.message)
        elif member.state in ANSWERING:  # otherwise its keeper has already recorded a state
            self.fleet.mark(
                member.id, WorkerState.DEAD, why=error.message, expected=isinstance(error, EngineClosedError)
            )

    def none_available(self, work: WorkKind, model: str = "", *, model_digest: str = "") -> NoWorkerError:
        """Returns the error that says that no worker can do this work, with the state of each worker."""
        members = [
            member for member in self.fleet.members if not member.facts.takes_texts and member.models.may_have(model)
        ]
        differs = [model_digest and not member.has_weights(model_digest, model=model) for member in members]
        states = [
            f"{member.state}{' with other weights' if other else ''}"
            for member, other in zip(members, differs, strict=True)
        ]
        named = ", ".join(f"{member.id} is {state}" for member, state in zip(members, states, strict=True))
        error = NoWorkerError(f"no worker can {work.name.lower()} now: {named or 'there is none'}")
        if any(member.worker is None or not member.worker.local for member in self.fleet.members):
            counts = ", ".join(f"{count} {state}" for state, count in Counter(states).items())  # ids can be addresses
            error.client_message = f"No worker can {work.name.lower()} now: {counts or 'there is none'}. Try again."
        return error

    def _choose(
        self, work: WorkKind, request: GenerateRequest, *, excluding: Sequence[str], decided: bool
    ) -> ChosenWorker | None:
        """`decided`: True if the worker gets the group, so that the decision is counted and its reason recorded."""
        turn = next(self._turns[work]) if decided else 0
        surveyed = survey(self.fleet, work, request=request, excluding=excluding, turn=turn)
        decision = surveyed and choose(surveyed.candidates, surveyed.needs, policy=self._policy, turn=turn)
        if not surveyed or not decision:
            return None
        member, worker = surveyed.compared[decision.index]
        if decided:
            self._figures.decisions[decision.reason] += 1
            member.last_decision = decision.why
            logger.debug("group %s is given to %s: %s", request.request_id, member.id, decision.why)
        return ChosenWorker(member, worker, surveyed.backlog(decision.index))


def work_span(name: str, chosen: ChosenWorker, *, request: GenerateRequest, tracer: Tracer) -> Span:
    """Starts the span of a worker's work for a group, in the span of the group's request."""
    parent = tracer.of(request.traceparent)
    if parent is NO_SPAN:
        return NO_SPAN
    return parent.child(
        name,
        {"motet.worker": chosen.member.id, "motet.choices": len(request.choices), "motet.part": request.request_id},
        kind=SpanKind.INTERNAL if chosen.worker.local else SpanKind.CLIENT,
    )
