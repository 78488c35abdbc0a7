"""What routing counts, as `/metrics` and `/status` tell it. All counters only grow while the server lives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class RoutingFigures:
    """One moment's figures. Mappings have every key that can occur, or those that have occurred."""

    bypasses: Mapping[str, int] = field(default_factory=dict)
    """Groups that did without prefill workers, by reason."""
    migrations: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Groups that lost their worker, by (cause, outcome)."""
    choices_resumed: int = 0
    """Choices that went on elsewhere."""
    tokens_replayed: int = 0
    """Tokens they had written before, and which were computed again for it."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """Choices of a worker, by what decided."""
    overlap_tokens: int = 0
    """Prompt tokens whose KV the chosen workers had, as far as was known."""
    routed_tokens: int = 0
    """Prompt tokens of all groups that were given to a worker."""
    spreads: int = 0
    """Groups that were split over several decode workers."""
    choices: Mapping[str, int] = field(default_factory=dict)
    """Choices open now, by worker."""
    queued: int = 0
    """Groups waiting for room on a worker at this moment."""
    queue_seconds: tuple[int, ...] = ()
    """How many groups waited so long: one count for each bound of `QUEUE_S`, one for longer ones."""
    queue_seconds_sum: float = 0.0
    pull_fallbacks: Mapping[str, int] = field(default_factory=dict)
    """Groups whose KV did not come and was computed on decode, by reason."""
    tickets_unused: Mapping[str, int] = field(default_factory=dict)
    """Prefilled prompts that nobody fetched, by what became of them."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Engine processes started again, by worker."""


class TicketFigures(Protocol):
    """What engines that are not ours count of their tickets."""

    @property
    def pull_fallbacks(self) -> Mapping[str, int]: ...

    @property
    def tickets_unused(self) -> Mapping[str, int]: ...


QUEUE_S = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of `queue_seconds`."""
