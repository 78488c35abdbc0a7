"""Trunks that stay after their groups, since somebody may ask for more choices of the same prompt (`keep_s`).

A kept trunk is joined as that of a running group is: no token of the prompt is computed but the last. It holds its
blocks until its time is up, or until it is given up, the least recently used one first:

    blocks are needed elsewhere     idle blocks of the prefix cache are taken first. Nothing is gained by a trunk that
                                    running groups share, so it stays
    another one is to be kept       and all of them, each block counted once, would be more than `--keep-gb` allows.
                                    Those that running groups share go last

It is used for as long as a running group shares it. Its full blocks stay in the prefix cache after its end.
"""

from collections import Counter
from collections.abc import Callable
from itertools import chain

from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.step.sequence import Group
from motet.engines.native.step.sharing import SharedTrunk, Sharing
from motet.metrics.stats import EngineStats


class KeptTrunks:
    """Owned by the scheduler. Holds the blocks of each kept trunk."""

    def __init__(
        self,
        pool: BlockPool,
        sharing: Sharing,
        *,
        counters: EngineStats,
        clock: Callable[[], float],
        max_blocks: int | None = None,
    ) -> None:
        """`max_blocks`: the most that all kept trunks may have; None: as many as the pool has."""
        self._pool = pool
        self._sharing = sharing
        self._counters = counters
        self._clock = clock
        self._max_blocks = pool.num_blocks if max_blocks is None else max_blocks
        self._kept: dict[SharedTrunk, float] = {}
        """When the time of each is up. The least recently used one comes first."""
        self._sharers = Counter[int]()
        """The number of kept trunks that have each block."""
        self.next_end_s: float | None = None
        """The time at which `end_late` has something to do."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that nobody else holds."""
        return self._pool.num_freed_by(self.tables())

    def tables(self) -> list[list[int]]:
        return [trunk.blocks for trunk in self._kept]

    def keep(self, trunk: SharedTrunk, seconds: float) -> None:
        """Keeps a trunk that is computed for so long from now, or for as long as it was kept already; not at all if it
        is larger than all kept ones may be."""
        if len(trunk.blocks) > self._max_blocks:
            self._counters.trunks_given_up += 1
            return
        if trunk not in self._kept:
            self._pool.share(trunk.blocks)
            self._sharers.update(trunk.blocks)
            trunk.kept = True
        self._kept[trunk] = max(self._clock() + seconds, self._kept.pop(trunk, 0.0))
        while len(self._sharers) > self._max_blocks:
            unused = (one for one in self._kept if not one.groups)
            self._give_up(next(unused, next(iter(self._kept))))
        self._note_next()

    def used_by(self, group: Group) -> None:
        """Notes that a group uses the trunk of its prompt no more. If that trunk is kept, it is now the last to go."""
        trunk = self._sharing.trunk(group)
        if trunk is not None and trunk in self._kept:
            self._kept[trunk] = self._kept.pop(trunk)

    def end_late(self) -> None:
        """Ends those whose time is up."""
        if self.next_end_s is not None and self.next_end_s <= (now_s := self._clock()):
            self._end([trunk for trunk, end_s in self._kept.items() if end_s <= now_s])

    def make_room(self, num_blocks: int, *, besides: SharedTrunk | None = None) -> bool:
        """Returns True if so many blocks are free, if necessary without some of the kept trunks: not without `besides`,
        nor those that running groups share. If even all of them were too few, none is ended."""
        if self._pool.num_free >= num_blocks:
            return True
        able = [trunk for trunk in self._kept if not trunk.groups and trunk is not besides]
        if self._pool.num_free + self._pool.num_freed_by([trunk.blocks for trunk in able]) < num_blocks:
            return False
        for trunk in able:
            if self._pool.num_free < num_blocks:
                self._give_up(trunk)
        return True

    def end_all(self) -> None:
        self._end(list(self._kept))

    def check(self) -> None:
        """Raises AssertionError unless each block is counted, and there are no more of them than may be kept."""
        if self._sharers != Counter(chain.from_iterable(self.tables())):
            raise AssertionError("the blocks of kept trunks are not those that are counted")
        if len(self._sharers) > self._max_blocks:
            raise AssertionError(f"{len(self._sharers)} blocks are kept, at most {self._max_blocks} may be")
        if self.next_end_s != min(self._kept.values(), default=None):
            raise AssertionError("a kept trunk would not end at its time")

    def _give_up(self, trunk: SharedTrunk) -> None:
        """Ends a trunk before its time."""
        self._counters.trunks_given_up += 1
        self._end([trunk])

    def _end(self, trunks: list[SharedTrunk]) -> None:
        for trunk in trunks:
            del self._kept[trunk]
            self._pool.release(trunk.blocks)
            for block in trunk.blocks:
                self._sharers[block] -= 1
                if not self._sharers[block]:
                    del self._sharers[block]
            self._sharing.forsake(trunk)
        self._note_next()

    def _note_next(self) -> None:
        self.next_end_s = min(self._kept.values(), default=None)
