"""Trunks that stay after their groups, since somebody may ask for more choices of the same prompt (`keep_s`).

A kept trunk is joined as that of a running group is: no token of the prompt is computed but the last. It holds its
blocks until its time is up or they are needed: idle blocks of the prefix cache are taken first, then those of the kept
trunk whose time is up next. Its full blocks stay in the prefix cache after that.
"""

from collections.abc import Callable

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
        self.next_end_s: float | None = None
        """The time at which `end_late` has something to do."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that nobody else holds."""
        return self._pool.num_freed_by(self.tables())

    def tables(self) -> list[list[int]]:
        return [trunk.blocks for trunk in self._kept]

    def keep(self, trunk: SharedTrunk, seconds: float) -> None:
        """Keeps a trunk that is computed for so long from now, or for as long as it was kept already."""
        if trunk not in self._kept:
            self._pool.share(trunk.blocks)
            trunk.kept = True
        self._kept[trunk] = max(self._clock() + seconds, self._kept.get(trunk, 0.0))
        self._note_next()

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
        for trunk in sorted(able, key=self._kept.__getitem__):
            if self._pool.num_free < num_blocks:
                self._end([trunk])
        return True

    def end_all(self) -> None:
        self._end(list(self._kept))

    def _end(self, trunks: list[SharedTrunk]) -> None:
        for trunk in trunks:
            del self._kept[trunk]
            self._pool.release(trunk.blocks)
            self._sharing.forsake(trunk)
        self._note_next()

    def _note_next(self) -> None:
        self.next_end_s = min(self._kept.values(), default=None)
