"""Chooses the worker for the next group: pure, so that the rule can be read and tested in one place.

1. Workers to be avoided are left out, then those without room for the group; each step only if somebody is left.
2. The policy decides among the rest.
3. Among equal workers the turn decides: they take turns, and the same books always give the same choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from motet.routing.choosing.cost import (
    WEIGHTS,
    Candidate,
    CostWeights,
    GroupNeeds,
    WorkKind,
    cost,
    explained,
    has_room,
    own_cost,
    prompt_cost,
)
from motet.types import Policy

NAMED_IN_WHY = 4


class Reason(StrEnum):
    """Why the worker was chosen; a label of the metric."""

    ONLY_ONE = "only-one"
    """There was no other worker."""
    ROOM = "room"
    """All others had no room, or were to be avoided."""
    COST = "cost"
    PREFIX = "prefix"
    """The least cost, because of the cached prefix: without it another worker would be no dearer."""
    LOAD = "load"
    SESSION = "session"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    place: int
    """The index of the candidate that is chosen."""
    reason: Reason
    why: str


@dataclass(frozen=True, slots=True)
class _Selection:
    """One choice of a worker: `places` are the indices of the candidates that the policy may take."""

    candidates: Sequence[Candidate]
    needs: GroupNeeds
    places: Sequence[int]
    turn: int
    weights: CostWeights

    def least(self, key: Callable[[int], tuple[float, ...]]) -> int:
        """Returns the place with the least key; among equal ones the first from the turn on."""
        count = len(self.candidates)
        return min(self.places, key=lambda place: (key(place), (place - self.turn) % count))

    def session_place(self) -> int | None:
        return next((place for place in self.places if self.candidates[place].has_session), None)


def choose(
    candidates: Sequence[Candidate], needs: GroupNeeds, *, policy: Policy, turn: int, weights: CostWeights = WEIGHTS
) -> WorkerChoice | None:
    """Returns None if there are no candidates. `turn`: the number of choices made before."""
    if not candidates:
        return None
    if len(candidates) == 1:
        return WorkerChoice(0, Reason.ONLY_ONE, f"only {candidates[0].id} is there")
    places = _with_room(candidates, needs)
    if len(places) == 1:
        only = candidates[places[0]]
        return WorkerChoice(
            places[0], Reason.ROOM, f"only {only.id} of {len(candidates)} has room and is not to be avoided"
        )
    ballot = _Selection(candidates, needs, places, turn, weights)
    return _RULES[policy](ballot)


def _with_room(candidates: Sequence[Candidate], needs: GroupNeeds) -> Sequence[int]:
    """Returns the places that the policy may choose from."""
    everybody = range(len(candidates))
    welcome = [place for place in everybody if not candidates[place].avoid] or everybody
    return [place for place in welcome if has_room(candidates[place], needs)] or welcome


def _least_cost(ballot: _Selection) -> WorkerChoice:
    candidates, needs, weights = ballot.candidates, ballot.needs, ballot.weights
    costs = {place: cost(candidates[place], needs, weights=weights) for place in ballot.places}
    best = ballot.least(lambda place: (costs[place],))
    session = ballot.session_place()
    if session is not None and session != best and _worth_staying(ballot, session, dearer=costs[session] - costs[best]):
        return WorkerChoice(session, Reason.SESSION, f"session was here: {_costs(ballot, [session, best])}")
    shown = sorted(costs, key=lambda place: (place != best, costs[place]))[:NAMED_IN_WHY]
    reason = Reason.PREFIX if _for_its_prefix(ballot, best, costs=costs) else Reason.COST
    return WorkerChoice(best, reason, f"least of {len(costs)}: {_costs(ballot, shown)}")


def _worth_staying(ballot: _Selection, session: int, *, dearer: float) -> bool:
    """Returns True if the session stays where it was. It is often not known, or not yet,
    what its worker has cached. So this worker may be dearer by the cost of the prompt, and by a slack beside that."""
    may_be_cached = own_cost(ballot.candidates[session], ballot.needs, weights=ballot.weights)
    return dearer <= may_be_cached + ballot.weights.session_slack


def _for_its_prefix(ballot: _Selection, best: int, *, costs: dict[int, float]) -> bool:
    """Returns True if, without any cached prefixes, another worker would be no dearer."""
    if not ballot.candidates[best].cached_tokens:
        return False

    def cold(place: int) -> float:
        one = ballot.candidates[place]
        return costs[place] + prompt_cost(one.cached_tokens, one, needs=ballot.needs, weights=ballot.weights)

    return any(cold(place) <= cold(best) for place in costs if place != best)


def _least_loaded(ballot: _Selection) -> WorkerChoice:
    candidates = ballot.candidates
    prefill = ballot.needs.work is WorkKind.PREFILL

    def burden(place: int) -> tuple[int, int, int]:
        one = candidates[place]
        return one.queued_tokens if prefill else 0, one.open_choices, one.held_blocks

    best = ballot.least(burden)
    one = candidates[best]
    load = f"{one.queued_tokens} tokens queued, {one.open_choices} choices, {one.held_blocks} blocks"
    return WorkerChoice(best, Reason.LOAD, f"least loaded of {len(ballot.places)}: {one.id} ({load})")


def _next_in_turn(ballot: _Selection) -> WorkerChoice:
    best = ballot.least(lambda _: ())
    return WorkerChoice(best, Reason.TURN, f"turn {ballot.turn}: {ballot.candidates[best].id}")


def _stay(ballot: _Selection) -> WorkerChoice:
    place = ballot.session_place()
    if place is None:
        return _least_loaded(ballot)
    return WorkerChoice(place, Reason.SESSION, f"session was on {ballot.candidates[place].id}")


def _costs(ballot: _Selection, places: Sequence[int]) -> str:
    return ", ".join(explained(ballot.candidates[place], ballot.needs, weights=ballot.weights) for place in places)


_RULES: dict[Policy, Callable[[_Selection], WorkerChoice]] = {
    Policy.KV: _least_cost,
    Policy.LEAST_LOADED: _least_loaded,
    Policy.ROUND_ROBIN: _next_in_turn,
    Policy.SESSION: _stay,
}
