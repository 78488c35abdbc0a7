"""Gives the groups of one router to the members of its fleet, with the parts that all groups share.

chooser     chooses workers, and records which of them failed
prefiller   prefills prompts, and returns tickets
releases    releases the tickets that no part reads
"""

from motet.errors import EngineDiedError, MotetError, OverloadedError, RequestError
from motet.metrics.routing import RoutingFigures, TicketLog
from motet.routing.choosing.prefill_plan import SplitFacts, plan_parts
from motet.routing.groups.chooser import WorkerChooser
from motet.routing.groups.placement import Placement
from motet.routing.groups.prefiller import Prefiller
from motet.routing.groups.tickets import TicketReleases
from motet.routing.groups.unfinished import Unfinished
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.serving import WorkKind
from motet.settings.server_config import CellConfig, RoutingConfig
from motet.tracing.spans import NO_TRACES, Tracer
from motet.types import GenerateRequest


class Dispatcher:
    """Splits groups, and places their parts."""

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
        """`tickets`: counts tickets that no worker could release."""
        self.fleet = fleet
        self.tracer = tracer
        self.chooser = WorkerChooser(fleet, figures, policy=routing.routing_policy)
        self.prefiller = Prefiller(self.chooser, figures, cell=cell, tracer=tracer)
        self.releases = TicketReleases(fleet, log=tickets)
        self._figures = figures
        self._spread_choices = routing.spread_choices

    def part_sizes(self, request: GenerateRequest, *, prefilled: bool) -> list[int]:
        """Returns the number of choices of each part of the group; one part means no split. `prefilled`: True if the
        prompt is prefilled first, so that the group has at most as many parts as its ticket can have readers.

        Greedy groups, whose choices are computed once, and groups with a client's ticket, which has one reader, are not
        split."""
        choices, spread_choices = len(request.choices), self._spread_choices
        if not 0 < spread_choices < choices or request.sampling.greedy or request.ticket is not None:
            return [choices]
        serving = self.fleet.catalog.serving(request.model)
        levels = sorted(member.load.open_choices for member in serving.generate.members)
        sizes = plan_parts(
            SplitFacts(choices, len(request.prompt), request.sampling.max_tokens, ticket=prefilled),
            levels[: serving.ticket_readers] if prefilled else levels,
            spread_choices=spread_choices,
        )
        self._figures.spreads += len(sizes) > 1
        return sizes

    def place(self, request: GenerateRequest, unfinished: Unfinished) -> Placement:
        """Gives the group to a worker. Raises NoWorkerError, or the error of the worker's engine."""
        chosen = self.chooser.choose(WorkKind.GENERATE, request)
        if chosen is None:
            raise self.chooser.none_available(WorkKind.GENERATE, request.model, model_digest=request.model_digest)
        try:
            placement = Placement(chosen, self.fleet, request=request, unfinished=unfinished, tracer=self.tracer)
        except RequestError:
            raise
        except MotetError as error:
            if isinstance(error, EngineDiedError | OverloadedError):
                self.chooser.record_failure(chosen.member, chosen.worker, error=error)
            raise error.of_worker(chosen.member.id, remote=not chosen.worker.local) from error
        self.fleet.sessions[WorkKind.GENERATE].record(request.session_id, chosen.member.id)
        self._figures.routed_tokens += len(request.prompt)
        self._figures.overlap_tokens += len(request.prompt) - chosen.backlog.own_tokens
        return placement

    def check(self) -> None:
        """Raises AssertionError unless every group and every release has ended, and the fleet has no load."""
        self.prefiller.check()
        self.releases.check()
        self.fleet.check()
