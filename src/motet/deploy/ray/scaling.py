"""Computes the number of replicas from choices and prompts, since a request may be one choice or a hundred.

    decode     open choices / --choices-per-decode
    prefill    prompts under way / --prompts-per-prefill
    both       fullness of a replica / FULL, if that is more: long prompts fill its KV with few choices

Serve brings the load of each replica (`load_of`) to its controller, which asks a policy for the number of replicas,
keeps it between the least and the most, and acts when it has been the same for a while. Serve itself starts the first
replica as soon as a call waits (`call_for_prefill`). Serve sends this module to its controller by value: its imports at
run time must be there.
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motet.metrics.stats import EngineStats

CHOICES, PROMPTS, FULLNESS = "choices", "prompts", "fullness"
"""The figures that replicas report."""
FULL = 0.75
"""A replica that is fuller than this may have no room for the next large group."""
EXACT_DIGITS = 6
"""Digits to round to: means are sums of floats, and 2.0000000001 replicas are two."""


class ReplicasByLoad:
    """A policy of Serve for one deployment."""

    def __init__(self, *, counted: str, per_replica: int) -> None:
        self._counted = counted
        self._per_replica = per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, object]]:
        """Returns the wanted number of replicas, and an empty state. `context`: an `AutoscalingContext`."""
        told = context.aggregated_metrics or {}
        fullness = told.get(FULLNESS, {})
        loads = [
            max(counted / self._per_replica, fullness.get(replica, 0.0) / FULL)
            for replica, counted in told.get(self._counted, {}).items()
        ]
        return math.ceil(round(sum(loads), EXACT_DIGITS)), {}


def load_of(stats: "EngineStats", before: "EngineStats", *, max_num_seqs: int) -> dict[str, float]:
    """Returns a replica's load. A prompt that came and went since `before` counts as one."""
    came = stats.prompt_tokens != before.prompt_tokens
    return {
        CHOICES: float(stats.choices_running + stats.choices_waiting),
        PROMPTS: float(max(stats.groups_running + stats.groups_waiting, came)),
        FULLNESS: max(stats.choices_running / max_num_seqs, stats.blocks_used / max(1, stats.blocks_total)),
    }
