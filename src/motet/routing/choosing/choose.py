"""Chooses the worker for the next group. Pure, so that the rule can be read and tested in one place.

1. Workers to be avoided are left out, then workers without capacity for the group. A step that would leave out all
   workers leaves out none.
2. The policy decides among the rest.
3. Among equal workers the turn decides: they take turns, and the same loads always give the same choice.
"""

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
    own_cost,
    prompt_cost,
)
from motet.routing.workers.serving import WorkKind
from motet.types import Policy

NAMED_IN_WHY = 4
"""Number of workers whose costs the reason of a decision names."""


class Reason(StrEnum):
    """The reason why the worker was chosen. A label of the metric."""

    ONLY_ONE = "only-one"
    """There was no other worker."""
    CAPACITY = "room"
    """All other workers had no capacity, or were to be avoided."""
    COST = "cost"
    PREFIX = "prefix"
    """The lowest cost, because of the cached prefix: without it another worker would not cost more."""
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
    """One choice of a worker. `indices`: indices of the candidates that the policy may choose."""

    candidates: Sequence[Candidate]
    needs: GroupNeeds
    indices: Sequence[int]
    turn: int
    weights: CostWeights

    def lowest(self, key: Callable[[int], tuple[float, ...]]) -> int:
        """Returns the index with the lowest key. Among equal ones, returns the first from the turn on."""
        count = len(self.candidates)
        return min(self.indices, key=lambda index: (key(index), (index - self.turn) % count))

    def session_index(self) -> int | None:
        return next((index for index in self.indices if self.candidates[index].has_session), None)


def choose(
    candidates: Sequence[Candidate], needs: GroupNeeds, *, policy: Policy, turn: int, weights: CostWeights = WEIGHTS
) -> WorkerChoice | None:
    """Returns None if there are no candidates. `turn`: number of choices made before."""
    if not candidates:
        return None
    if len(candidates) == 1:
        return WorkerChoice(0, Reason.ONLY_ONE, f"only {candidates[0].id} is available")
    indices = _with_capacity(candidates, needs)
    if len(indices) == 1:
        only = candidates[indices[0]]
        why = f"only {only.id} of {len(candidates)} has capacity and is not to be avoided"
        return WorkerChoice(indices[0], Reason.CAPACITY, why)
    selection = _Selection(candidates, needs, indices, turn, weights)
    return _RULES[policy](selection)


def _with_capacity(candidates: Sequence[Candidate], needs: GroupNeeds) -> Sequence[int]:
    """Returns the indices that the policy may choose."""
    all_indices = range(len(candidates))
    not_avoided = [index for index in all_indices if not candidates[index].avoid] or all_indices
    return [index for index in not_avoided if has_capacity(candidates[index], needs)] or not_avoided


def _lowest_cost(selection: _Selection) -> WorkerChoice:
    candidates, needs, weights = selection.candidates, selection.needs, selection.weights
    costs = {index: cost(candidates[index], needs, weights=weights) for index in selection.indices}
    best = selection.lowest(lambda index: (costs[index],))
    session = selection.session_index()
    if (
        session is not None
        and session != best
        and _worth_staying(selection, session, more=costs[session] - costs[best])
    ):
        return WorkerChoice(session, Reason.SESSION, f"its session was here: {_costs(selection, [session, best])}")
    shown = sorted(costs, key=lambda index: (index != best, costs[index]))[:NAMED_IN_WHY]
    reason = Reason.PREFIX if _for_its_prefix(selection, best, costs=costs) else Reason.COST
    return WorkerChoice(best, reason, f"lowest of {len(costs)}: {_costs(selection, shown)}")


def _worth_staying(selection: _Selection, session: int, *, more: float) -> bool:
    """Returns True if the session stays on its worker, which costs `more` than the best one. What its worker has cached
    is often unknown, so it may cost more by the cost of the prompt, and by a slack."""
    possibly_cached = own_cost(selection.candidates[session], selection.needs, weights=selection.weights)
    return more <= possibly_cached + selection.weights.session_slack


def _for_its_prefix(selection: _Selection, best: int, *, costs: dict[int, float]) -> bool:
    """Returns True if another worker would not cost more without cached prefixes."""
    if not selection.candidates[best].cached_tokens:
        return False

    def cold(index: int) -> float:
        one = selection.candidates[index]
        return costs[index] + prompt_cost(one.cached_tokens, one, needs=selection.needs, weights=selection.weights)

    return any(cold(index) <= cold(best) for index in costs if index != best)


def _least_loaded(selection: _Selection) -> WorkerChoice:
    candidates = selection.candidates
    prefill = selection.needs.work is WorkKind.PREFILL

    def load_of(index: int) -> tuple[int, int, int]:
        one = candidates[index]
        return one.queued_tokens if prefill else 0, one.open_choices, one.held_blocks

    best = selection.lowest(load_of)
    one = candidates[best]
    load = f"{one.queued_tokens} tokens queued, {one.open_choices} choices, {one.held_blocks} blocks"
    return WorkerChoice(best, Reason.LOAD, f"least loaded of {len(selection.indices)}: {one.id} ({load})")


def _next_in_turn(selection: _Selection) -> WorkerChoice:
    best = selection.lowest(lambda _: ())
    return WorkerChoice(best, Reason.TURN, f"turn {selection.turn}: {selection.candidates[best].id}")


def _session_or_least_loaded(selection: _Selection) -> WorkerChoice:
    index = selection.session_index()
    if index is None:
        return _least_loaded(selection)
    return WorkerChoice(index, Reason.SESSION, f"its session was on {selection.candidates[index].id}")


def _costs(selection: _Selection, indices: Sequence[int]) -> str:
    return ", ".join(
        explained(selection.candidates[index], selection.needs, weights=selection.weights) for index in indices
    )


_RULES: dict[Policy, Callable[[_Selection], WorkerChoice]] = {
    Policy.KV: _lowest_cost,
    Policy.LEAST_LOADED: _least_loaded,
    Policy.ROUND_ROBIN: _next_in_turn,
    Policy.SESSION: _session_or_least_loaded,
}
