"""How many replicas the load wants, counted in choices and prompts: a request may be one choice or a hundred.

    decode     open choices / --choices-per-decode
    prefill    prompts under way / --prompts-per-prefill
    both       how full a replica is / FULL, where that is more: long prompts fill its KV with few choices

What each replica has (`load_of`) Serve brings to its controller, which asks a policy how many there should be, keeps
that between the least and the most, and waits until it has been wanted for a while. From zero to one it goes by itself,
as soon as a call waits (`waking`). Serve sends this module to its controller by value: what it imports at run time must
be there.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from motet.types import EngineStats

CHOICES, PROMPTS, FULLNESS = "choices", "prompts", "fullness"
"""What replicas tell."""
FULL = 0.75
"""Of what a replica can hold: the next group of many choices, or with a long prompt, may find no room."""
EXACT_DIGITS = 6
"""Means over time are sums of floats: 2.0000000001 replicas are two."""


class Context(Protocol):
    """What a policy is told: of Serve's `AutoscalingContext` what is needed here."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[object, float]] | None:
        """By figure and running replica, as a mean of the last seconds."""
        ...


class ReplicasByLoad:
    """A policy of Serve for one deployment."""

    def __init__(self, *, counted: str, per_replica: int) -> None:
        self._counted = counted
        self._per_replica = per_replica

    def __call__(self, context: Context) -> tuple[int, dict[str, object]]:
        """How many it should have, and what to remember: nothing."""
        told = context.aggregated_metrics or {}
        fullness = told.get(FULLNESS, {})
        loads = [
            max(counted / self._per_replica, fullness.get(replica, 0.0) / FULL)
            for replica, counted in told.get(self._counted, {}).items()
        ]
        return math.ceil(round(sum(loads), EXACT_DIGITS)), {}


def load_of(stats: "EngineStats", before: "EngineStats", max_num_seqs: int) -> dict[str, float]:
    """What a replica tells of an engine that runs at most so many choices at once. A prompt that came and went since
    it told the last time counts as one: a replica that is quick is used all the same."""
    came = stats.prompt_tokens != before.prompt_tokens
    return {
        CHOICES: float(stats.choices_running + stats.choices_waiting),
        PROMPTS: float(max(stats.groups_running + stats.groups_waiting, came)),
        FULLNESS: max(stats.choices_running / max_num_seqs, stats.blocks_used / max(1, stats.blocks_total)),
    }
