"""The states of a group, and of each part of it."""

from collections.abc import Mapping
from enum import Enum, auto


class GroupState(Enum):
    QUEUED = auto()
    """No worker has the group."""
    PREFILLING = auto()
    """A prefill worker computes the prompt."""
    GENERATING = auto()
    """The choices are on a worker, or each part on a worker of its own."""
    MOVING = auto()
    """The worker was lost, or refused the group. The group waits for another worker."""
    OVER = auto()


GENERATING = GroupState.GENERATING  # for the code that runs for each token: the attribute takes 50 ns in Python 3.11
NEXT: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.QUEUED: frozenset({GroupState.PREFILLING, GENERATING, GroupState.MOVING, GroupState.OVER}),
    GroupState.PREFILLING: frozenset({GENERATING, GroupState.MOVING, GroupState.OVER}),
    GENERATING: frozenset({GroupState.MOVING, GroupState.OVER}),
    GroupState.MOVING: frozenset({GroupState.PREFILLING, GENERATING, GroupState.OVER}),
    GroupState.OVER: frozenset(),
}
"""The allowed transitions. A part whose first worker refuses it changes from QUEUED to MOVING."""


def transition(old: GroupState, new: GroupState) -> GroupState:
    """Returns `new`. Raises AssertionError if the transition is not allowed."""
    if new is not old and new not in NEXT[old]:
        raise AssertionError(f"a group cannot go from {old.name} to {new.name}")
    return new
