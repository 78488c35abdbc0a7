"""Which worker gets the next group: pure, so that the rule can be read and tested in one place.

1. Workers to be avoided are left out, then those without room for the group; each step only if somebody is left.
2. The policy decides among the rest.
3. Of equal ones the turn decides, so that they take turns and the same books give the same choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from motet.errors import ConfigError
from motet.routing.candidate import Candidate, Wanted, Work, has_room
from motet.routing.cost import WEIGHTS, Weights, cost, explained, own_cost, prompt_cost

__all__ = ["Candidate", "Decision", "Policy", "Reason", "Wanted", "Work", "choose", "policy_named"]

NAMED_IN_WHY = 4
"""Workers whose costs a decision spells out."""


class Policy(StrEnum):
    """What decides among workers with room."""

    KV = "kv"
    """The least cost (`cost`): what is to be computed there, and what is being written."""
    LEAST_LOADED = "least-loaded"
    """The fewest open choices, then the fewest blocks; for prefill the fewest tokens queued first."""
    ROUND_ROBIN = "round-robin"
    SESSION = "session"
    """Where the session was last, if there is one, else the least loaded."""


class Reason(StrEnum):
    """What decided; a label of the metric."""

    ONLY_ONE = "only-one"
    """Nobody else was there."""
    ROOM = "room"
    """Nobody else had room, or was not to be avoided."""
    COST = "cost"
    PREFIX = "prefix"
    """The cost, and if nobody had any of the prompt another would be no dearer."""
    LOAD = "load"
    SESSION = "session"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Decision:
    place: int
    """Index into the candidates."""
    reason: Reason
    why: str
    """One line for a person."""


@dataclass(frozen=True, slots=True)
class _Ballot:
    """One choice being made: `places` are those of the candidates that the policy may take."""

    candidates: Sequence[Candidate]
    wanted: Wanted
    places: Sequence[int]
    turn: int
    weights: Weights

    def least(self, key: Callable[[int], tuple[float, ...]]) -> int:
        """The place with the least key; of equal ones the first from the turn on."""
        count = len(self.candidates)
        return min(self.places, key=lambda place: (key(place), (place - self.turn) % count))

    def session_place(self) -> int | None:
        return next((place for place in self.places if self.candidates[place].has_session), None)


def policy_named(name: str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        names = ", ".join(Policy)
        raise ConfigError(f"unknown routing policy {name!r}: it is one of {names}") from None


def choose(
    candidates: Sequence[Candidate], wanted: Wanted, policy: Policy, *, turn: int, weights: Weights = WEIGHTS
) -> Decision | None:
    """None: there are no candidates. `turn` counts the choices that were made."""
    if not candidates:
        return None
    if len(candidates) == 1:
        return Decision(0, Reason.ONLY_ONE, f"only {candidates[0].id} is there")
    places = _with_room(candidates, wanted)
    if len(places) == 1:
        only = candidates[places[0]]
        return Decision(
            places[0], Reason.ROOM, f"only {only.id} of {len(candidates)} has room and is not to be avoided"
        )
    ballot = _Ballot(candidates, wanted, places, turn, weights)
    return _RULES[policy](ballot)


def _with_room(candidates: Sequence[Candidate], wanted: Wanted) -> Sequence[int]:
    """Places of those that the policy may choose from."""
    everybody = range(len(candidates))
    welcome = [place for place in everybody if not candidates[place].avoid] or everybody
    return [place for place in welcome if has_room(candidates[place], wanted)] or welcome


def _least_cost(ballot: _Ballot) -> Decision:
    candidates, wanted, weights = ballot.candidates, ballot.wanted, ballot.weights
    costs = {place: cost(candidates[place], wanted, weights) for place in ballot.places}
    best = ballot.least(lambda place: (costs[place],))
    session = ballot.session_place()
    if session is not None and session != best and _worth_staying(ballot, session, costs[session] - costs[best]):
        return Decision(session, Reason.SESSION, f"session was here: {_costs(ballot, [session, best])}")
    shown = sorted(costs, key=lambda place: (place != best, costs[place]))[:NAMED_IN_WHY]
    reason = Reason.PREFIX if _for_its_prefix(ballot, best, costs) else Reason.COST
    return Decision(best, reason, f"least of {len(costs)}: {_costs(ballot, shown)}")


def _worth_staying(ballot: _Ballot, session: int, dearer: float) -> bool:
    """What the worker of the session has cached may be known late or not at all; it is at most the whole prompt. So it
    may be dearer by what it is thought to have to compute, and by a slack that keeps a session from wandering."""
    may_be_cached = own_cost(ballot.candidates[session], ballot.wanted, ballot.weights)
    return dearer <= may_be_cached + ballot.weights.session_slack


def _for_its_prefix(ballot: _Ballot, best: int, costs: dict[int, float]) -> bool:
    """Whether another one would be no dearer if nobody had any of the prompt."""
    if not ballot.candidates[best].cached_tokens:
        return False

    def cold(place: int) -> float:
        one = ballot.candidates[place]
        return costs[place] + prompt_cost(one.cached_tokens, one, ballot.wanted, ballot.weights)

    return any(cold(place) <= cold(best) for place in costs if place != best)


def _least_loaded(ballot: _Ballot) -> Decision:
    candidates = ballot.candidates
    prefill = ballot.wanted.work is Work.PREFILL

    def burden(place: int) -> tuple[int, int, int]:
        one = candidates[place]
        return one.queued_tokens if prefill else 0, one.open_choices, one.held_blocks

    best = ballot.least(burden)
    one = candidates[best]
    load = f"{one.queued_tokens} tokens queued, {one.open_choices} choices, {one.held_blocks} blocks"
    return Decision(best, Reason.LOAD, f"least loaded of {len(ballot.places)}: {one.id} ({load})")


def _next_in_turn(ballot: _Ballot) -> Decision:
    best = ballot.least(lambda _: ())
    return Decision(best, Reason.TURN, f"turn {ballot.turn}: {ballot.candidates[best].id}")


def _stay(ballot: _Ballot) -> Decision:
    place = ballot.session_place()
    if place is None:
        return _least_loaded(ballot)
    return Decision(place, Reason.SESSION, f"session was on {ballot.candidates[place].id}")


def _costs(ballot: _Ballot, places: Sequence[int]) -> str:
    return ", ".join(explained(ballot.candidates[place], ballot.wanted, ballot.weights) for place in places)


_RULES: dict[Policy, Callable[[_Ballot], Decision]] = {
    Policy.KV: _least_cost,
    Policy.LEAST_LOADED: _least_loaded,
    Policy.ROUND_ROBIN: _next_in_turn,
    Policy.SESSION: _stay,
}
