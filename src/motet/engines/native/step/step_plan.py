"""The work of one step. The scheduler makes the plan, the runner runs it, `commit` settles it; nothing changes it.

Here and elsewhere, objects that are made for every token of a step are msgspec structs: making a frozen dataclass takes
eight times as long. `gc=False`: nothing points back to them, so the garbage collector need not count them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from motet.engines.native.sample.state import ChoiceSampling
from motet.engines.native.step.sequence import ChoiceSequence, Group


class Draft(msgspec.Struct, frozen=True):
    """A token that a choice may write next."""

    token_id: int
    state: ChoiceSampling
    """That of the choice once it has written it."""
    source: int | None
    """A place in `drafts.SPANS`; None if a grammar leaves no other token."""


class TailChunk(msgspec.Struct, frozen=True, gc=False):
    """Runs output tokens [begin, end) of a sequence; the next token is drawn if these are its last ones, and one more
    after each draft."""

    sequence: ChoiceSequence
    begin: int
    end: int
    drafts: tuple[Draft, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.end - self.begin + len(self.drafts)


@dataclass(frozen=True)
class TrunkChunk:
    """Runs prompt tokens [begin, end) of a group; after the last one, every fresh sequence draws its first token."""

    group: Group
    begin: int
    end: int


@dataclass(frozen=True)
class StepPlan:
    """Tails are ordered by trunk and group, and trunks that begin alike are neighbours, so that attention reads once
    what neighbours have in common."""

    tails: tuple[TailChunk, ...] = ()
    trunks: tuple[TrunkChunk, ...] = ()

    def groups_of(self, rows: Iterable[int]) -> set[Group]:
        """Returns the groups to which these rows of the flat batch belong; drafts' rows belong to nobody."""
        owners: list[Group | None] = []
        for chunk in self.tails:
            owners += [chunk.sequence.group] * (chunk.end - chunk.begin) + [None] * len(chunk.drafts)
        owners += [chunk.group for chunk in self.trunks for _ in range(chunk.begin, chunk.end)]
        return {group for row in rows if (group := owners[row]) is not None}

    def without_drafts(self) -> "StepPlan":
        return StepPlan(tuple(TailChunk(chunk.sequence, chunk.begin, chunk.end) for chunk in self.tails), self.trunks)

    def __bool__(self) -> bool:
        return bool(self.tails or self.trunks)


class OpenPlan:
    """A plan that is being made, within a budget of tokens. Tails are added oldest first, and replays after them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Number of tokens for which there is still room."""
        self.tails: list[TailChunk] = []
        self.trunks: list[TrunkChunk] = []
        self._in_order = True
        self._shared = False

    def add_new(self, sequence: ChoiceSequence) -> None:
        """Adds the new tokens of a sequence, as many as the budget allows."""
        count = min(sequence.pending, self.budget)
        self.tails.append(TailChunk(sequence, sequence.computed, sequence.computed + count))
        self._shared |= sequence.group.shares
        self.budget -= count

    def add_replay(self, sequence: ChoiceSequence) -> None:
        """Adds as many of a sequence's pending tokens as the budget allows."""
        self.add_new(sequence)
        self._in_order = False

    def add_drafts(self, place: int, drafts: Sequence[Draft]) -> None:
        """Adds drafts to a tail, as many as the budget allows."""
        chunk, fitting = self.tails[place], tuple(drafts[: self.budget])
        self.tails[place] = TailChunk(chunk.sequence, chunk.begin, chunk.end, fitting)
        self.budget -= len(fitting)

    def add_trunk(self, group: Group) -> None:
        """Adds as much of a prompt as the budget allows; nothing if it is computed or is being fetched."""
        count = min(group.trunk_tokens - group.computed, self.budget)
        if count and group.pull is None:
            self.trunks.append(TrunkChunk(group, group.computed, group.computed + count))
            self.budget -= count

    def plan(self) -> StepPlan:
        if self._shared:  # makes neighbours of siblings, of groups that share a trunk, and of trunks that begin alike
            self.tails.sort(key=lambda chunk: (chunk.sequence.group.path, *_age(chunk)))
        elif not self._in_order:
            self.tails.sort(key=_age)
        return StepPlan(tuple(self.tails), tuple(self.trunks))


def _age(chunk: TailChunk) -> tuple[tuple[int, int], tuple[int, int, int]]:
    return chunk.sequence.group.trunk, chunk.sequence.age
