"""Collects the work of a step, within a budget of tokens and a limit on the cost."""

import math
from collections.abc import Sequence

from motet.engines.native.scheduling.clients import EngineClients
from motet.engines.native.scheduling.queues import QueueKey, queue_key
from motet.engines.native.scheduling.step_cost import (
    FIRST_TOKEN_COST,
    SCORED_TOKEN_COST,
    prompt_cost,
    prompt_tokens_within,
    row_cost,
    trunk_cost,
)
from motet.engines.native.step.sequence import ChoiceSequence, Group, SequenceState
from motet.engines.native.step.step_plan import Draft, StepPlan, TailChunk, TrunkChunk

MIN_CHUNK = 4
"""Minimum number of tokens of the first replay or prompt of a step, even beyond the limit on the cost. If it has fewer
pending tokens, all of them are computed."""
MAX_SCORED_ROWS = 256
"""Maximum number of scored prompt tokens in a step. It limits the memory of their logits, one row of the vocabulary's
size for each token."""
SCORED_PART = 0.75
"""Maximum number of scored prompt tokens in a step, relative to the token budget. Scoring a token adds a third to
its time, which must not make the steps of other groups longer."""
SCORES_PER_ROW = 64
"""Number of cached scores that count as one scored token. A step that completes several prompts sends all their scores,
8,000 in 2 ms."""


class PlanBuilder:
    """Builds a plan within a budget of tokens and a limit on the cost. Charges clients for the work that is added."""

    def __init__(self, budget: int, clients: EngineClients, *, max_cost: float = math.inf) -> None:
        self.budget = budget
        """Number of tokens that can still be added."""
        self.max_cost = max_cost
        self.cost = 0.0
        self.tails: list[TailChunk] = []
        self.trunks: list[TrunkChunk] = []
        self.groups: set[Group] = set()
        """The groups of `tails` and `trunks`, also those that have lost their blocks since they were added."""
        self.unfinished: set[QueueKey] = set()
        """Priorities and clients of work that is left out of the step for lack of time or rows."""
        self._clients = clients
        self._origins: set[tuple[int, int]] = set()
        """Origins of the trunks that the tails read."""
        self._num_prefill_chunks = 0
        """Number of chunks of replays and prompts."""
        self._in_order = True
        """True if the tails are ordered by age."""
        self._shared = False
        """True if one of the tails has a trunk that other groups can share."""

    @property
    def is_full(self) -> bool:
        """True if no replay or prompt can be added. The first one is added whatever its cost."""
        return not self.budget or (self.cost >= self.max_cost and self._num_prefill_chunks > 0)

    def add_tail(self, sequence: ChoiceSequence, *, in_order: bool = True) -> None:
        """Adds the pending tokens of a sequence that does not replay. `in_order`: False if sequences are not added in
        order of age."""
        self._add_tail(sequence, min(sequence.num_pending, self.budget), cost=row_cost(sequence))
        self._in_order &= in_order

    def add_replay(self, sequence: ChoiceSequence) -> None:
        """Adds as many pending tokens of a sequence as the limits allow."""
        first = len(sequence.group.prompt) + sequence.num_computed
        count = self._size_of_chunk(sequence.group, sequence.num_pending, first=first)
        if count:
            self._add_tail(sequence, count, cost=prompt_cost(first, first + count))
            self._in_order = False

    def add_trunk(self, group: Group, *, max_scored: int) -> None:
        """Adds as many pending prompt tokens of a group as the limits allow, unless a pull fetches them. `max_scored`:
        maximum number of scored prompt tokens in the step."""
        first, trunk = group.trunk.num_computed, group.trunk
        if trunk.complete or group.is_fetching:
            return
        num_pending = trunk.num_tokens - first
        if group.is_scored:
            num_unscored = max(0, group.first_scored_row - first)
            num_pending = min(num_pending, num_unscored + max(0, max_scored - self._num_scored()))
            if first + num_pending < trunk.num_tokens:
                self.unfinished.add(queue_key(group))
            if not num_pending:
                return
        if count := self._size_of_chunk(group, num_pending, first=first):
            chunk = TrunkChunk(group, first, first + count)
            self.trunks.append(chunk)
            self.groups.add(group)
            self.budget -= count
            num_sampled = len(group.fresh) if chunk.end == len(group.prompt) else 0
            cost = prompt_cost(first, chunk.end) + chunk.num_scored * SCORED_TOKEN_COST
            self._charge(group, cost + num_sampled * FIRST_TOKEN_COST)

    def add_drafts(self, index: int, drafts: Sequence[Draft]) -> None:
        """Adds drafts to the tail with this index, as many as the budget allows."""
        chunk, fitting = self.tails[index], tuple(drafts[: self.budget])
        self.tails[index] = TailChunk(chunk.sequence, chunk.begin, chunk.end, fitting)
        self.budget -= len(fitting)
        self._charge(chunk.sequence.group, len(fitting) * row_cost(chunk.sequence))

    def drop_preempted(self) -> None:
        """Drops the chunks of sequences and groups that have lost their blocks since the chunks were added."""
        self.tails = [chunk for chunk in self.tails if chunk.sequence.state is SequenceState.RUNNING]
        self.trunks = [chunk for chunk in self.trunks if chunk.group.admitted]

    def build(self) -> StepPlan:
        if self._shared:  # siblings, groups with one trunk, and trunks with common leading stretches become adjacent
            self.tails.sort(key=lambda chunk: (chunk.sequence.group.trunk.path, *_age(chunk)))
        elif not self._in_order:
            self.tails.sort(key=_age)
        return StepPlan(tuple(self.tails), tuple(self.trunks), self.cost)

    def _num_scored(self) -> int:
        """Returns the number of scored prompt tokens in the step, including the tokens that cached scores count as."""
        return sum(
            chunk.num_scored + len(chunk.group.facts.scores) // SCORES_PER_ROW
            for chunk in self.trunks
            if chunk.group.is_scored
        )

    def _size_of_chunk(self, group: Group, num_pending: int, *, first: int) -> int:
        """Returns the number of pending tokens of a replay or prompt, from position `first` on, that fit into the step.
        Counts the chunk."""
        minimum = 0 if self._num_prefill_chunks else MIN_CHUNK
        count = min(num_pending, self.budget, max(minimum, prompt_tokens_within(self.max_cost - self.cost, first)))
        if count:
            self._num_prefill_chunks += 1
        else:
            self.max_cost = self.cost  # what is left is less than the cost of one token
        if count < num_pending:
            self.unfinished.add(queue_key(group))
        return count

    def _add_tail(self, sequence: ChoiceSequence, count: int, *, cost: float) -> None:
        group = sequence.group
        if group.trunk.origin not in self._origins:
            self._origins.add(group.trunk.origin)
            cost += trunk_cost(len(group.prompt))
        self.tails.append(TailChunk(sequence, sequence.num_computed, sequence.num_computed + count))
        self.groups.add(group)
        self._shared |= group.trunk.shared
        self.budget -= count
        self._charge(group, cost)

    def _charge(self, group: Group, cost: float) -> None:
        self.cost += cost
        self._clients.charge(group, cost)


def max_scored_rows(budget: int) -> int:
    """Returns the maximum number of scored prompt tokens in a step of `budget` tokens."""
    return min(MAX_SCORED_ROWS, max(1, int(SCORED_PART * budget)))


def _age(chunk: TailChunk) -> tuple[tuple[int, int], tuple[int, int, int]]:
    return chunk.sequence.group.trunk.origin, chunk.sequence.age
