"""A step plan in the making: what fits into a step's budget of tokens."""

from motet.engines.native.plan import StepPlan, TailChunk, TrunkChunk
from motet.engines.native.sequence import Group, Sequence


class Draft:
    """Takes tails oldest first, and replays after them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens for which there is room."""
        self._tails: list[TailChunk] = []
        self._trunks: list[TrunkChunk] = []
        self._in_order = True

    def add_token(self, sequence: Sequence) -> None:
        """The last token written."""
        self._tails.append(TailChunk(sequence, sequence.computed, sequence.computed + 1))
        self.budget -= 1

    def add_replay(self, sequence: Sequence) -> None:
        """As much of what is pending as there is budget for."""
        count = min(sequence.pending, self.budget)
        self._tails.append(TailChunk(sequence, sequence.computed, sequence.computed + count))
        self.budget -= count
        self._in_order = False

    def add_trunk(self, group: Group) -> None:
        """As much of a prompt as there is budget for; nothing of one that is computed, or being fetched."""
        count = min(group.trunk_tokens - group.computed, self.budget)
        if count and group.pull is None:
            self._trunks.append(TrunkChunk(group, group.computed, group.computed + count))
            self.budget -= count

    def plan(self) -> StepPlan:
        """Siblings side by side."""
        if not self._in_order:
            self._tails.sort(key=lambda chunk: chunk.sequence.age)
        return StepPlan(tuple(self._tails), tuple(self._trunks))
