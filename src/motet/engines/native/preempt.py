"""Who gives up blocks when they run short: the youngest group, sibling by sibling, youngest first, its trunk last."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from motet.engines.native.sequence import Group, Sequence


@dataclass(frozen=True)
class TakeTail:
    """Take the tail of one sequence; it replays what it has written later."""

    sequence: Sequence


@dataclass(frozen=True)
class TakeTrunk:
    """Take the trunk of a group none of whose sequences holds a tail; the group waits again."""

    group: Group


def choose_victim(groups: SequenceOf[Group], asking: Sequence) -> TakeTail | TakeTrunk:
    """The next thing to take for the sake of `asking`, which may be its own tail. `groups` are the running ones.

    Groups older than the asking one are never touched, so the oldest always gets on; that its trunk and one tail fit
    is checked when the engine starts.
    """
    for group in sorted(groups, key=lambda running: running.age, reverse=True):
        holders = [sequence for sequence in group.sequences if sequence.blocks or sequence is asking]
        if holders:
            return TakeTail(max(holders, key=lambda holder: holder.age))
        if group.blocks:
            return TakeTrunk(group)
    return TakeTail(asking)
