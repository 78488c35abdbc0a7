"""Metrics of routing for `/metrics` and `/status`. Counters never decrease while the server runs."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from weakref import WeakValueDictionary

from motet.metrics.declare import counter_field, gauge_field, histogram_field
from motet.transfer.ticket import Ticket

UPDATE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
QUEUE_S = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

ByLabel = dict[str, int]
"""Counts by the value of a label, either for all possible values or for those that have occurred."""


@dataclass(kw_only=True)
class RoutingFigures:
    """Metrics of routing. A router owns one instance, to which its parts add; it reports copies with the gauges.

    A router knows clients by `GenerateRequest.client`; the server replaces these ids by names (`with_client_names`)."""

    choices: ByLabel = gauge_field(
        "worker_choices", "choices", "Open choices, as counted by routing.", labels=("worker",)
    )
    restarts: ByLabel = counter_field(
        "engine_restarts", "starts", "Restarts of an engine process that had ended.", labels=("worker",)
    )
    weight_updates: ByLabel = counter_field(
        "weight_updates", "updates", "Weight updates of all engines.", labels=("outcome",)
    )
    weight_update_seconds: Sequence[int] = histogram_field(
        "weight_update_seconds",
        "seconds",
        "Duration of successful weight updates.",
        bounds=UPDATE_S,
        sum_in="weight_update_seconds_sum",
    )
    weight_update_seconds_sum: float = 0.0
    decisions: ByLabel = counter_field(
        "routing_decisions",
        "decisions",
        "Assignments of groups to workers, by the deciding reason.",
        labels=("reason",),
    )
    routed_tokens: int = counter_field(
        "routing_prompt_tokens", "tokens", "Prompt tokens of groups that were assigned to a worker."
    )
    overlap_tokens: int = counter_field(
        "routing_overlap_tokens",
        "tokens",
        "Prompt tokens whose KV the assigned worker already had, or was computing, as far as the router knew.",
    )
    spreads: int = counter_field("group_spreads", "groups", "Groups split over several decode workers.")
    queued: int = gauge_field("groups_queued", "groups", "Groups that wait for capacity on a worker.")
    queued_choices: int = gauge_field("choices_queued", "choices", "Choices of groups that wait for capacity.")
    adapters_running: Sequence[str] = ()
    """Adapters with running groups."""
    adapters_waiting: Sequence[str] = ()
    """Adapters with groups that wait for capacity."""
    client_choices: ByLabel = gauge_field(
        "client_choices", "choices", "Open choices of a client on workers, as counted by routing.", labels=("client",)
    )
    client_blocks: ByLabel = gauge_field(
        "client_kv_blocks",
        "blocks",
        "KV blocks that a client's open choices and their prompts take on workers, as counted by routing.",
        labels=("client",),
    )
    client_queued_choices: ByLabel = gauge_field(
        "client_choices_queued", "choices", "Choices of a client's groups that wait for capacity.", labels=("client",)
    )
    queue_seconds: Sequence[int] = histogram_field(
        "queue_seconds",
        "seconds",
        "Time for which a group waited for capacity on a worker.",
        bounds=QUEUE_S,
        sum_in="queue_seconds_sum",
        once_in_vllm="request_queue_time_seconds",
    )
    queue_seconds_sum: float = 0.0
    migrations: dict[tuple[str, str], int] = counter_field(
        "migrations", "moves", "Moves of groups away from a worker.", labels=("cause", "outcome"), in_status=True
    )
    choices_resumed: int = counter_field(
        "choices_resumed", "choices", "Unfinished choices of moved groups, resumed by another worker.", in_status=True
    )
    tokens_replayed: int = counter_field(
        "resumed_tokens", "tokens", "Output tokens of resumed choices, which were computed again."
    )
    bypasses: ByLabel = counter_field(
        "bypasses",
        "groups",
        "Groups whose prompt was computed by decode without a request to prefill.",
        labels=("reason",),
        in_status=True,
    )
    pull_fallbacks: ByLabel = counter_field(
        "pull_fallbacks",
        "groups",
        "Groups on vLLM workers whose KV did not arrive and was computed by decode.",
        labels=("reason",),
    )
    tickets_unused: ByLabel = counter_field(
        "tickets_unused", "tickets", "Tickets of vLLM workers that no decode worker used.", labels=("end",)
    )


def with_client_names(figures: RoutingFigures, names: Mapping[str, str], *, other: str) -> RoutingFigures:
    """Returns the figures with the name of each client in place of its id. All clients without a name count as one
    client named `other`, so that the number of labels is bounded."""

    def named(by_client: ByLabel) -> ByLabel:
        counts = dict.fromkeys((*names.values(), other), 0)
        for client, count in by_client.items():
            counts[names.get(client, other)] += count
        return counts

    return replace(
        figures,
        client_choices=named(figures.client_choices),
        client_blocks=named(figures.client_blocks),
        client_queued_choices=named(figures.client_queued_choices),
    )


class PullFallback(StrEnum):
    """Reason why a group did not get the KV of its ticket; a label of the metric."""

    LATE = "late"
    """The group's first token did not arrive in time."""
    FAILED = "failed"
    """The decode server ended the request with the ticket."""


class TicketEnd(StrEnum):
    """How a ticket ended; a label of the metric."""

    TAKEN = "taken"
    """A decode server has the ticket, and either reads the KV or releases it."""
    RELEASED = "released"
    """The ticket was not used, and was released on the prefill server."""
    LEFT = "left"
    """The ticket was not used and could not be released: its lease expires, unless another engine releases it."""


UNUSED = (TicketEnd.RELEASED, TicketEnd.LEFT)
MAX_REMEMBERED = 4096
"""Maximum number of remembered tickets. Older ones are not looked up any more, since their groups have ended."""


class TicketLog:
    """Remembers how tickets of vLLM servers ended. A gateway's engines share it: several can release one ticket."""

    def __init__(self) -> None:
        self.pull_fallbacks = Counter[str]({reason.value: 0 for reason in PullFallback})
        self.tickets_unused = Counter[str]({end.value: 0 for end in UNUSED})
        self._ends: OrderedDict[tuple[str, str], TicketEnd] = OrderedDict()
        self._releases: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Locks of tickets that are being released."""

    @asynccontextmanager
    async def release(self, ticket: Ticket) -> AsyncIterator[bool]:
        """Wraps an attempt to release a ticket, one at a time. Yields False if the ticket has already ended."""
        name = _name(ticket)
        lock = self._releases.setdefault(name, asyncio.Lock())
        async with lock:
            yield not self._is_over(name)

    def left(self, ticket: Ticket) -> None:
        """Records that the ticket could not be released."""
        if ticket.foreign and not self._is_over(_name(ticket)):
            self.ended(ticket, TicketEnd.LEFT)

    def ended(self, ticket: Ticket, end: TicketEnd) -> None:
        """Records the end of a ticket. A second call for the same end is not counted."""
        name = _name(ticket)
        if self._ends.get(name) is end:
            return
        if end in UNUSED:
            self.tickets_unused[end.value] += 1
        self._ends[name] = end
        if len(self._ends) > MAX_REMEMBERED:
            self._ends.popitem(last=False)

    def _is_over(self, name: tuple[str, str]) -> bool:
        return self._ends.get(name, TicketEnd.LEFT) is not TicketEnd.LEFT


def _name(ticket: Ticket) -> tuple[str, str]:
    return ticket.remote_engine_id, ticket.remote_request_id
