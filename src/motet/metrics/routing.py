"""The figures of routing for `/metrics` and `/status`. Counters only grow while the server lives."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakValueDictionary

from motet.metrics.declare import counter_field, gauge_field, histogram_field
from motet.transfer.ticket import Ticket

UPDATE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
QUEUE_S = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

ByLabel = dict[str, int]
"""A count for each value of a label; either all possible values, or those that have occurred."""


@dataclass(kw_only=True)
class RoutingFigures:
    """Figures of routing. A router has one, to which its parts add; what it reports is a copy with the gauges."""

    choices: ByLabel = gauge_field(
        "worker_choices", "choices", "Choices open now, as routing counts them.", labels=("worker",)
    )
    restarts: ByLabel = counter_field(
        "engine_restarts", "starts", "Starts of an engine process after it had ended.", labels=("worker",)
    )
    weight_updates: ByLabel = counter_field(
        "weight_updates", "updates", "Orders to give all engines new weights.", labels=("outcome",)
    )
    weight_update_seconds: Sequence[int] = histogram_field(
        "weight_update_seconds",
        "seconds",
        "Time from such an order to its end, if all got them.",
        bounds=UPDATE_S,
        sum_in="weight_update_seconds_sum",
    )
    weight_update_seconds_sum: float = 0.0
    decisions: ByLabel = counter_field(
        "routing_decisions", "decisions", "Decisions which worker gets a group, by what decided.", labels=("reason",)
    )
    routed_tokens: int = counter_field(
        "routing_prompt_tokens", "tokens", "Prompt tokens of groups that were given to a worker."
    )
    overlap_tokens: int = counter_field(
        "routing_overlap_tokens",
        "tokens",
        "Prompt tokens of those groups whose KV that worker had, or had been given to compute, as far as was known.",
    )
    spreads: int = counter_field("group_spreads", "groups", "Groups split over several workers that decode.")
    queued: int = gauge_field("groups_queued", "groups", "Groups waiting for room on a worker.")
    queued_choices: int = gauge_field("choices_queued", "choices", "Choices of those groups.")
    queue_seconds: Sequence[int] = histogram_field(
        "queue_seconds",
        "seconds",
        "Time that a group waited for room on a worker.",
        bounds=QUEUE_S,
        sum_in="queue_seconds_sum",
    )
    queue_seconds_sum: float = 0.0
    migrations: dict[tuple[str, str], int] = counter_field(
        "migrations", "moves", "Moves of groups away from a worker.", labels=("cause", "outcome"), in_status=True
    )
    choices_resumed: int = counter_field(
        "choices_resumed", "choices", "Unfinished choices of those groups, given to another worker.", in_status=True
    )
    tokens_replayed: int = counter_field(
        "resumed_tokens", "tokens", "Tokens that those choices had written, and which were computed again."
    )
    bypasses: ByLabel = counter_field(
        "bypasses",
        "groups",
        "Groups whose prompt decode computed without asking prefill.",
        labels=("reason",),
        in_status=True,
    )
    pull_fallbacks: ByLabel = counter_field(
        "pull_fallbacks",
        "groups",
        "Groups on vLLM workers whose KV did not come and was computed on decode.",
        labels=("reason",),
    )
    tickets_unused: ByLabel = counter_field(
        "tickets_unused", "tickets", "Tickets of vLLM workers that no decode worker used.", labels=("end",)
    )


class PullFallback(StrEnum):
    """Why a group did not get the KV of its ticket; a label of the metric."""

    LATE = "late"
    """Its first token did not come in time."""
    FAILED = "failed"
    """The decode server ended the request that had the ticket."""


class TicketEnd(StrEnum):
    """How a ticket ended; a label of the metric."""

    TAKEN = "taken"
    """A decode server has it, and reads the KV or tells prefill that nobody will."""
    RELEASED = "released"
    """It was not used, and the prefill server was informed at once."""
    LEFT = "left"
    """It was not used, and nobody could inform prefill: its lease expires, unless somebody else gives it back."""


UNUSED = (TicketEnd.RELEASED, TicketEnd.LEFT)
REMEMBERED = 4096
"""Number of tickets remembered; an older one is not looked up any more, since its group has ended."""


class TicketBook:
    """Remembers how tickets of vLLM servers ended. A gateway's engines share one: several may give back a ticket."""

    def __init__(self) -> None:
        self.pull_fallbacks = Counter[str]({reason.value: 0 for reason in PullFallback})
        self.tickets_unused = Counter[str]({end.value: 0 for end in UNUSED})
        self._ends: OrderedDict[tuple[str, str], TicketEnd] = OrderedDict()
        self._releases: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Locks of tickets that are being given back."""

    @asynccontextmanager
    async def release(self, ticket: Ticket) -> AsyncIterator[bool]:
        """Surrounds an attempt to give back a ticket, one at a time; yields False if it has ended already."""
        name = _name(ticket)
        lock = self._releases.setdefault(name, asyncio.Lock())
        async with lock:
            yield not self._is_over(name)

    def left(self, ticket: Ticket) -> None:
        """Notes that nobody could give the ticket back."""
        if ticket.foreign and not self._is_over(_name(ticket)):
            self.ended(ticket, TicketEnd.LEFT)

    def ended(self, ticket: Ticket, end: TicketEnd) -> None:
        """Notes the end of a ticket; a second call for the same end does not count."""
        name = _name(ticket)
        if self._ends.get(name) is end:
            return
        if end in UNUSED:
            self.tickets_unused[end.value] += 1
        self._ends[name] = end
        if len(self._ends) > REMEMBERED:
            self._ends.popitem(last=False)

    def _is_over(self, name: tuple[str, str]) -> bool:
        return self._ends.get(name, TicketEnd.LEFT) is not TicketEnd.LEFT


def _name(ticket: Ticket) -> tuple[str, str]:
    return ticket.remote_engine_id, ticket.remote_request_id
