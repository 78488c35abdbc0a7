"""Chooses the worker for the next group. Pure, so that the rule can be read and tested in one place.

1. Workers to be avoided are left out, unless no worker would be left. Of the remaining workers, only workers with free
   capacity for the group are kept. If there is none, these are workers on which its client stays within its share, or
   else workers on which a part of its choices can start.
2. The policy chooses among the others.
3. Equal workers take turns. The same loads and the same turn always give the same choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from motet.routing.choosing.cost import (
    WEIGHTS,
    Candidate,
    CostWeights,
    GroupNeeds,
    cost,
    explained,
    has_capacity,
    has_capacity_in_share,
    has_partial_capacity,
    own_cost,
    prompt_cost,
)
from motet.routing.workers.serving import WorkKind
from motet.settings.server_config import Policy

NAMED_IN_WHY = 4
"""Number of workers whose costs the reason of a decision names."""


class Reason(StrEnum):
    """The reason why the worker was chosen. A label of the metric."""

    ONLY_ONE = "only-one"
    CAPACITY = "room"
    """Every other worker had no capacity, or was to be avoided."""
    COST = "cost"
    PREFIX = "prefix"
    """The lowest cost, and only because of cached prefixes: without them another worker would not cost more."""
    LOAD = "load"
    SESSION = "session"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    index: int
    """Index of the chosen candidate."""
    reason: Reason
    why: str


@dataclass(frozen=True, slots=True)
class _Selection:
    """The input of a policy. `indices`: indices of the candidates among which it chooses."""

    candidates: Sequence[Candidate]
    needs: GroupNeeds
    indices: Sequence[int]
    turn: int
    weights: CostWeights

    def lowest(self, key: Callable[[int], tuple[float, ...]]) -> int:
        """Returns the index with the lowest key. Among equal keys, returns the first index from the turn on."""
        count = len(self.candidates)
        return min(self.indices, key=lambda index: (key(index), (index - self.turn) % count))

    def session_index(self) -> int | None:
        return next((index for index in self.indices if self.candidates[index].has_session), None)


def choose(
    candidates: Sequence[Candidate], needs: GroupNeeds, *, policy: Policy, turn: int, weights: CostWeights = WEIGHTS
) -> WorkerChoice | None:
    """Returns the chosen worker, or None if there are no candidates. `turn`: number of earlier choices."""
    if not candidates:
        return None
    if len(candidates) == 1:
        return WorkerChoice(0, Reason.ONLY_ONE, f"only {candidates[0].id} is available")
    indices = _with_capacity(candidates, needs)
    if len(indices) == 1:
        only = candidates[indices[0]]
        why = f"only {only.id} of {len(candidates)} has capacity and is not to be avoided"
        return WorkerChoice(indices[0], Reason.CAPACITY, why)
    return _RULES[policy](_Selection(candidates, needs, indices, turn, weights))


def _with_capacity(candidates: Sequence[Candidate], needs: GroupNeeds) -> Sequence[int]:
    """Returns the indices of the candidates that remain after step 1."""
    all_indices = range(len(candidates))
    not_avoided = [index for index in all_indices if not candidates[index].avoid] or all_indices
    for can_start in (has_capacity, has_capacity_in_share, has_partial_capacity):
        if able := [index for index in not_avoided if can_start(candidates[index], needs)]:
            return able
    return not_avoided


def _lowest_cost(selection: _Selection) -> WorkerChoice:
    candidates, needs, weights = selection.candidates, selection.needs, selection.weights
    costs = {index: cost(candidates[index], needs, weights=weights) for index in selection.indices}
    best = selection.lowest(lambda index: (costs[index],))
    session = selection.session_index()
    if session is not None and session != best:
        # The router often does not know what the session's last worker has cached: possibly the complete prompt.
        possibly_cached = own_cost(candidates[session], needs, weights=weights)
        if costs[session] - costs[best] <= possibly_cached + weights.session_slack:
            return WorkerChoice(session, Reason.SESSION, f"its session was here: {_costs(selection, [session, best])}")
    shown = sorted(costs, key=lambda index: (index != best, costs[index]))[:NAMED_IN_WHY]
    reason = Reason.PREFIX if _for_its_prefix(selection, best, costs=costs) else Reason.COST
    return WorkerChoice(best, reason, f"lowest of {len(costs)}: {_costs(selection, shown)}")


def _for_its_prefix(selection: _Selection, best: int, *, costs: dict[int, float]) -> bool:
    """Returns True if another worker would not cost more without cached prefixes."""
    if not selection.candidates[best].cached_tokens:
        return False

    def uncached_cost(index: int) -> float:
        candidate = selection.candidates[index]
        own = prompt_cost(candidate.cached_tokens, candidate, needs=selection.needs, weights=selection.weights)
        return costs[index] + own

    return any(uncached_cost(index) <= uncached_cost(best) for index in costs if index != best)


def _least_loaded(selection: _Selection) -> WorkerChoice:
    candidates = selection.candidates
    prefill = selection.needs.work is WorkKind.PREFILL

    def load_of(index: int) -> tuple[int, int, int]:
        candidate = candidates[index]
        return candidate.queued_tokens if prefill else 0, candidate.open_choices, candidate.held_blocks

    chosen = candidates[best := selection.lowest(load_of)]
    load = f"{chosen.queued_tokens} tokens queued, {chosen.open_choices} choices, {chosen.held_blocks} blocks"
    return WorkerChoice(best, Reason.LOAD, f"least loaded of {len(selection.indices)}: {chosen.id} ({load})")


def _next_in_turn(selection: _Selection) -> WorkerChoice:
    best = selection.lowest(lambda _: ())
    return WorkerChoice(best, Reason.TURN, f"turn {selection.turn}: {selection.candidates[best].id}")


def _session_or_least_loaded(selection: _Selection) -> WorkerChoice:
    index = selection.session_index()
    if index is None:
        return _least_loaded(selection)
    return WorkerChoice(index, Reason.SESSION, f"its session was on {selection.candidates[index].id}")


def _costs(selection: _Selection, indices: Sequence[int]) -> str:
    needs, weights = selection.needs, selection.weights
    return ", ".join(explained(selection.candidates[index], needs, weights=weights) for index in indices)


_RULES: dict[Policy, Callable[[_Selection], WorkerChoice]] = {
    Policy.KV: _lowest_cost,
    Policy.LEAST_LOADED: _least_loaded,
    Policy.ROUND_ROBIN: _next_in_turn,
    Policy.SESSION: _session_or_least_loaded,
}
