"""The engine that requests go to, put together from the parts of routing: the same for every server.

    Queued(Spread(Migrating(Disaggregated(Routed(fleet)))))

Whether there are prefill workers, one worker or a thousand, is the fleet's business and may change at any time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from motet.config import CellConfig, RoutingConfig
from motet.engines.base import Engine
from motet.metrics.routing import RoutingFigures, TicketFigures
from motet.routing.bypass import BypassRules
from motet.routing.choose import Work, policy_named
from motet.routing.disaggregate import Disaggregated
from motet.routing.fleet import Fleet
from motet.routing.migrate import Migrating
from motet.routing.moves import MigrationRules
from motet.routing.queued import Queued
from motet.routing.routed import Routed
from motet.routing.spread import Spread
from motet.transfer.ticket import Ticket
from motet.types import Role


class TicketBook(TicketFigures, Protocol):
    """Of the engines that are not ours."""

    def left(self, ticket: Ticket) -> None:
        """Nobody was there to give it back."""
        ...


@dataclass(frozen=True)
class Router:
    """Made by `make_router`."""

    fleet: Fleet
    engine: Engine
    """What requests go to; closing it closes every worker."""
    figures: Callable[[], RoutingFigures]


def make_router(
    routing: RoutingConfig,
    cell: CellConfig,
    *,
    role: Role = Role.BOTH,
    pd_figures: TicketBook | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Router:
    """`role`: of the server as its clients see it. `pd_figures`: what engines that are not ours count of tickets."""
    fleet = Fleet(clock=clock, session_expiry_s=routing.session_expiry_s)
    policy = policy_named(routing.routing_policy)
    routed = Routed(fleet, policy) if pd_figures is None else Routed(fleet, policy, left=pd_figures.left)
    rules = BypassRules(cell.bypass_tokens, cell.prefill_timeout_s, cell.prefill_may_come)
    disaggregated = Disaggregated(routed, routed, rules, role=role)
    migrating = Migrating(
        disaggregated,
        MigrationRules(routing.migration_limit, routing.migration_wait_s),
        changed=fleet.changed,
        hopeful=fleet.hopeful,
        clock=clock,
    )
    spread = Spread(
        migrating,
        disaggregated,
        spread_choices=routing.spread_choices,
        open_choices=lambda model: [member.open_choices for member in fleet.ready(Work.GENERATE, model)],
    )
    queued = Queued(
        spread,
        fleet,
        timeout_s=routing.queue_timeout_s,
        largest_part=routing.spread_choices,
        on_the_way=lambda model: disaggregated.choices_on_the_way(model) + spread.choices_on_the_way(model),
        clock=clock,
    )

    def figures() -> RoutingFigures:
        return RoutingFigures(
            bypasses=disaggregated.bypasses if cell.prefill_may_come or fleet.has_prefill() else {},
            migrations=migrating.figures.moves,
            choices_resumed=migrating.figures.choices_resumed,
            tokens_replayed=migrating.figures.tokens_replayed,
            decisions=routed.decisions,
            overlap_tokens=routed.overlap_tokens,
            routed_tokens=routed.routed_tokens,
            spreads=spread.spreads,
            queued=queued.queued,
            queue_seconds=queued.waits,
            queue_seconds_sum=queued.waits_sum_s,
            pull_fallbacks=pd_figures.pull_fallbacks if pd_figures else {},
            tickets_unused=pd_figures.tickets_unused if pd_figures else {},
            choices={member.id: member.books.open_choices for member in fleet.members},
        )

    return Router(fleet, queued, figures)
