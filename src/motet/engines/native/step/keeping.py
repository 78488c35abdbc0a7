"""Trunks that stay after their groups, since somebody may ask for more choices of the same prompt (`keep_s`).

A kept trunk is joined as that of a running group is: no token of the prompt is computed but the last. It holds its
blocks until its time is up or they are needed: idle blocks of the prefix cache are taken first, then those of the kept
trunk whose time is up next. Its full blocks stay in the prefix cache after that.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.step.sharing import SharedTrunk, Sharing


class KeptTrunks:
    """Owned by the scheduler. Holds the blocks of each kept trunk."""

    def __init__(self, pool: BlockPool, sharing: Sharing, *, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._sharing = sharing
        self._clock = clock
        self._kept: dict[SharedTrunk, float] = {}
        """When the time of each is up."""
        self._ends: list[tuple[float, int, SharedTrunk]] = []
        """A heap of these times. Those of trunks that were kept for longer since, or are kept no more, stay in it."""
        self._order = count()
        self.num_blocks = 0
        """Number of blocks that they hold; those of two count twice."""

    @property
    def next_end_s(self) -> float | None:
        """The time at which `end_late` has something to do."""
        return self._ends[0][0] if self._ends else None

    def tables(self) -> list[list[int]]:
        return [trunk.blocks for trunk in self._kept]

    def keep(self, trunk: SharedTrunk, seconds: float) -> None:
        """Keeps a trunk that is computed for so long from now, or for as long as it was kept already."""
        end_s = self._clock() + seconds
        if trunk not in self._kept:
            self._pool.share(trunk.blocks)
            self.num_blocks += len(trunk.blocks)
            trunk.kept = True
        elif end_s <= self._kept[trunk]:
            return
        self._kept[trunk] = end_s
        heappush(self._ends, (end_s, next(self._order), trunk))

    def end_late(self) -> None:
        """Ends those whose time is up."""
        while self._ends and self._ends[0][0] <= self._clock():
            self._pop()

    def end_next(self) -> bool:
        """Ends the one whose time is up next. Returns False if there is none."""
        while self._ends:
            if self._pop():
                return True
        return False

    def end_all(self) -> None:
        while self.end_next():
            pass

    def _pop(self) -> bool:
        """Takes the next time out, and ends the trunk that it is for. Returns False if that is no time to end it."""
        end_s, _, trunk = heappop(self._ends)
        if self._kept.get(trunk) != end_s:
            return False
        del self._kept[trunk]
        self.num_blocks -= len(trunk.blocks)
        self._pool.release(trunk.blocks)
        self._sharing.forsake(trunk)
        return True
