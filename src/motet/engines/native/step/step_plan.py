"""The work of one step. The scheduler makes the plan, the runner runs it, `commit` applies its results. A plan is
immutable.

Objects that are created for every token of a step are msgspec structs, in this and in other modules, because creating a
frozen dataclass takes eight times as long. Structs that are never in a reference cycle have `gc=False`, which exempts
them from garbage collection.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from motet.engines.native.sample.state import ChoiceSampling
from motet.engines.native.step.sequence import ChoiceSequence, Group


class Draft(msgspec.Struct, frozen=True):
    """A draft token of a choice."""

    token_id: int
    state: ChoiceSampling
    """Sampling state of the choice after this token."""
    source: int | None
    """Index in `ngrams.NGRAM_SIZES`; None if the grammar allows no other token."""


class TailChunk(msgspec.Struct, frozen=True, gc=False):
    """Computes output tokens [begin, end) of a sequence, and its drafts after them. If `end` is the number of the
    sequence's output tokens, the next token is sampled, and one more token after each draft."""

    sequence: ChoiceSequence
    begin: int
    end: int
    drafts: tuple[Draft, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.end - self.begin + len(self.drafts)


@dataclass(frozen=True)
class TrunkChunk:
    """Computes prompt tokens [begin, end) of a group. The first token of a fresh sequence is sampled from the logits of
    the last prompt token."""

    group: Group
    begin: int
    end: int

    @property
    def num_scored(self) -> int:
        """Number of tokens whose logits are needed for log-probabilities of the prompt."""
        return max(0, self.end - max(self.begin, self.group.first_scored_row)) if self.group.is_scored else 0


@dataclass(frozen=True)
class StepPlan:
    """The chunks of a step. Tails of the same trunk, and of trunks with common leading stretches, are adjacent, so that
    attention reads the shared blocks once."""

    tails: tuple[TailChunk, ...] = ()
    trunks: tuple[TrunkChunk, ...] = ()
    cost: float = 0.0
    """Expected cost (`step_cost`)."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, including drafts."""
        return sum(tail.num_rows for tail in self.tails) + sum(trunk.end - trunk.begin for trunk in self.trunks)

    def groups_of(self, rows: Iterable[int]) -> set[Group]:
        """Returns the groups of these rows of the flat batch. Rows of drafts are ignored."""
        owners: list[Group | None] = []
        for chunk in self.tails:
            owners += [chunk.sequence.group] * (chunk.end - chunk.begin) + [None] * len(chunk.drafts)
        owners += [chunk.group for chunk in self.trunks for _ in range(chunk.begin, chunk.end)]
        return {group for row in rows if (group := owners[row]) is not None}

    def without_drafts(self) -> "StepPlan":
        return StepPlan(tuple(TailChunk(chunk.sequence, chunk.begin, chunk.end) for chunk in self.tails), self.trunks)

    def __bool__(self) -> bool:
        return bool(self.tails or self.trunks)
