"""Who gives up blocks when they run short: the youngest group, sibling by sibling, youngest first, its trunk last."""

from bisect import bisect_left
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


def choose_victim(youngest: Group) -> TakeTail | TakeTrunk:
    """The next thing to take when a running choice needs a block; `youngest` is the youngest running group.

    No group older than the asking one is ever touched: every running group has a trunk, and the asking choice has a
    tail, its own, to lose. So the oldest always gets on; that its trunk and one tail fit is checked when the engine
    starts.
    """
    # Siblings lose their tails youngest first and get them back oldest first: those that hold one stand in front.
    holders = bisect_left(youngest.sequences, True, key=lambda sequence: not sequence.blocks)
    return TakeTail(youngest.sequences[holders - 1]) if holders else TakeTrunk(youngest)
