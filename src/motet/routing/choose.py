"""Which worker gets the next group: pure, so that the rule can be read and tested in one place."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Work(Enum):
    """What a worker is wanted for."""

    PREFILL = auto()
    GENERATE = auto()


@dataclass(frozen=True)
class Candidate:
    """A worker as the choice sees it."""

    up: bool
    """It has given a sign of life since it died, if it ever did."""
    may_be_tried: bool
    """It is up, or died a while ago."""
    waiting_tokens: int
    """Prompt tokens it was given and has not answered for yet."""
    open_choices: int
    """Choices it is to write, or writing."""

    def burden(self, work: Work) -> int:
        return self.waiting_tokens if work is Work.PREFILL else self.open_choices


def choose(candidates: Sequence[Candidate], work: Work) -> int | None:
    """The place of the least burdened candidate, the first of equal ones; None if there is none.

    Prefill goes where the fewest prompt tokens wait, for they are what it takes time over. A worker that died a while
    ago is tried again, because another one can be asked if it is still dead. Generating goes where the fewest choices
    are open, for each has a share in every step, and only to workers that are up: nobody begins a group again."""
    able = [place for place, one in enumerate(candidates) if (one.may_be_tried if work is Work.PREFILL else one.up)]
    return min(able, key=lambda place: candidates[place].burden(work), default=None)
