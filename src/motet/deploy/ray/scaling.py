"""Computes the number of replicas from choices and prompts, since a request can have one choice or a hundred.

    decode     open choices / --choices-per-decode
    prefill    running prompts / --prompts-per-prefill
    both       fullness of a replica / FULL, if this is more: long prompts fill its KV with few choices

Serve passes the load of each replica (`load_of`) to its controller. The controller calls the policy for the number of
replicas, limits it to the minimum and the maximum, and acts when it has stayed the same for the configured delay. If
no replica runs, Serve starts the first one as soon as a call waits (`clients.request_prefill`).

Serve pickles the policy by value for its controller: the modules that it uses must be installed there."""

import math
from typing import Any

from motet.metrics.stats import EngineStats

CHOICES, PROMPTS, FULLNESS = "choices", "prompts", "fullness"
"""The figures that replicas report."""
FULL = 0.75
"""Fullness from which a replica counts as full: it may lack the capacity for the next large group."""
EXACT_DIGITS = 6
"""Number of digits that count before rounding up: means are sums of floats, and 2.0000000001 replicas are two."""


class ReplicasByLoad:
    """A policy of Serve for one deployment."""

    def __init__(self, *, figure: str, per_replica: int) -> None:
        """`figure`: the reported figure that counts; `per_replica`: its target for one replica."""
        self._figure = figure
        self._per_replica = per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, object]]:
        """Returns the target number of replicas, and an empty state. `context`: an `AutoscalingContext`."""
        figures = context.aggregated_metrics or {}
        fullness = figures.get(FULLNESS, {})
        loads = [
            max(value / self._per_replica, fullness.get(replica, 0.0) / FULL)
            for replica, value in figures.get(self._figure, {}).items()
        ]
        return math.ceil(round(sum(loads), EXACT_DIGITS)), {}


def load_of(stats: EngineStats, before: EngineStats, *, max_num_seqs: int) -> dict[str, float]:
    """Returns a replica's load. A prompt that started and ended since `before` counts as one."""
    any_prompt = stats.prompt_tokens != before.prompt_tokens
    return {
        CHOICES: float(stats.choices_running + stats.choices_waiting),
        PROMPTS: float(max(stats.groups_running + stats.groups_waiting, any_prompt)),
        FULLNESS: max(stats.choices_running / max_num_seqs, stats.blocks_used / max(1, stats.blocks_total)),
    }
