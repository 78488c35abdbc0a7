"""What one step computes. Made by the scheduler, run by the runner, settled by `commit`; frozen in between.

What is made anew for every token of a step is a msgspec struct, here and elsewhere: a frozen dataclass takes eight
times as long to make. `gc=False`: nothing points back to it, so the garbage collector need not count it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from motet.engines.native.sequence import Group, Sequence


class TailChunk(msgspec.Struct, frozen=True, gc=False):
    """Written tokens [begin, end) of a sequence are run; at the end of what is written, a token is drawn."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def draws(self) -> bool:
        return self.end == len(self.sequence.written)


@dataclass(frozen=True)
class TrunkChunk:
    """Prompt tokens [begin, end) of a group are run; with the last one, every fresh sequence draws its first token."""

    group: Group
    begin: int
    end: int

    @property
    def completes(self) -> bool:
        return self.end == len(self.group.prompt)


@dataclass(frozen=True)
class StepPlan:
    """Tails stand group by group: siblings side by side, so that attention reads their trunk once."""

    tails: tuple[TailChunk, ...]
    trunks: tuple[TrunkChunk, ...]

    @property
    def num_tokens(self) -> int:
        tails = sum(chunk.end - chunk.begin for chunk in self.tails)
        return tails + sum(chunk.end - chunk.begin for chunk in self.trunks)

    def groups_of(self, rows: Iterable[int]) -> set[Group]:
        """Whose rows of the flat batch these are."""
        owners = [chunk.sequence.group for chunk in self.tails for _ in range(chunk.begin, chunk.end)]
        owners += [chunk.group for chunk in self.trunks for _ in range(chunk.begin, chunk.end)]
        return {owners[row] for row in rows}

    def __bool__(self) -> bool:
        return bool(self.tails or self.trunks)
