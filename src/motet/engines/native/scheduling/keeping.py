"""Trunks that are kept after their groups, so that a client can request more choices of the same prompt (`keep_s`).

A new group joins a kept trunk like the trunk of a running group, and computes only the last token of the prompt. A kept
trunk holds its blocks until its time is over. It ends earlier in two cases:

    blocks are needed elsewhere     Idle blocks of the prefix cache are taken first. Trunks that running groups
                                    share do not end, because that would free no block.
    `--keep-gb` is exceeded         The blocks of all kept trunks count, each block once. Trunks that running
                                    groups share end last.

The first trunk to end is the least recently used one of the client that keeps the most blocks for its weight.

A trunk is in use while a running group shares it. Its full blocks stay in the prefix cache after its end.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.scheduling.sharing import SharedTrunk, Sharing
from motet.engines.native.step.sequence import Group
from motet.metrics.stats import EngineStats


class KeptTrunks:
    """The kept trunks. Holds the blocks of each. Owned by the scheduler."""

    def __init__(
        self,
        pool: BlockPool,
        sharing: Sharing,
        *,
        counters: EngineStats,
        clock: Callable[[], float],
        max_blocks: int | None = None,
    ) -> None:
        """`max_blocks`: maximum number of blocks of all kept trunks; None means all blocks of the pool."""
        self._pool = pool
        self._sharing = sharing
        self._counters = counters
        self._clock = clock
        self._max_blocks = pool.num_blocks if max_blocks is None else max_blocks
        self._end_of: dict[SharedTrunk, float] = {}
        """Time at which each kept trunk ends, the least recently used trunk first."""
        self._holders = Counter[int]()
        """Number of kept trunks that hold each block."""
        self.next_end_s: float | None = None
        """Time at which the next kept trunk expires."""

    def __len__(self) -> int:
        return len(self._end_of)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that only kept trunks hold."""
        return self._pool.num_freed_by(self.tables())

    def tables(self) -> list[list[int]]:
        return [trunk.blocks for trunk in self._end_of]

    def keep(self, trunk: SharedTrunk, seconds: float) -> None:
        """Keeps a complete trunk of at most `max_blocks` for `seconds` from now, or until its present end if that is
        later."""
        if len(trunk.blocks) > self._max_blocks:
            self._counters.trunks_given_up += 1
            return
        if trunk not in self._end_of:
            self._pool.share(trunk.blocks)
            self._holders.update(trunk.blocks)
            trunk.kept = True
        self._end_of[trunk] = max(self._clock() + seconds, self._end_of.pop(trunk, 0.0))
        while len(self._holders) > self._max_blocks:
            unused = [kept for kept in self._end_of if not kept.groups]
            self._end_early(self._first_to_end(unused or [*self._end_of]))
        self._record_next()

    def used_by(self, group: Group) -> None:
        """Called when a group stops using its trunk. If it is kept, it becomes the most recently used kept trunk."""
        trunk = self._sharing.trunk_of(group)
        if trunk is not None and trunk in self._end_of:
            self._end_of[trunk] = self._end_of.pop(trunk)

    def end_expired(self) -> None:
        if self.next_end_s is not None and self.next_end_s <= (now_s := self._clock()):
            self._end([trunk for trunk, end_s in self._end_of.items() if end_s <= now_s])

    def ensure_free(self, num_blocks: int, *, spare: SharedTrunk | None = None) -> bool:
        """Returns True if the pool has `num_blocks` free blocks. Ends kept trunks if necessary, except `spare` and
        trunks that running groups share. Ends no trunk if even all of them would free too few blocks."""
        if self._pool.num_free >= num_blocks:
            return True
        unused = [trunk for trunk in self._end_of if not trunk.groups and trunk is not spare]
        if self._pool.num_free + self._pool.num_freed_by([trunk.blocks for trunk in unused]) < num_blocks:
            return False
        while self._pool.num_free < num_blocks:
            trunk = self._first_to_end(unused)
            unused.remove(trunk)
            self._end_early(trunk)
        return True

    def end_adapter(self, digest: str) -> None:
        """Ends the kept trunks of an adapter."""
        self._end([trunk for trunk in self._end_of if trunk.first.trunk.adapter_digest == digest])

    def end_all(self) -> None:
        self._end(list(self._end_of))

    def check(self) -> None:
        """Raises AssertionError unless the counts of blocks, their limit, and `next_end_s` are correct."""
        if self._holders != Counter(chain.from_iterable(self.tables())):
            raise AssertionError("the counted blocks are not the blocks of the kept trunks")
        if len(self._holders) > self._max_blocks:
            raise AssertionError(f"{len(self._holders)} blocks are kept, the maximum is {self._max_blocks}")
        if self.next_end_s != min(self._end_of.values(), default=None):
            raise AssertionError("a kept trunk would not end at its time")

    def _first_to_end(self, trunks: Sequence[SharedTrunk]) -> SharedTrunk:
        """Returns the least recently used of these trunks of the client that keeps the most blocks for its weight, in
        all kept trunks. `trunks`: in order of use."""
        kept = Counter[str]()
        for trunk in self._end_of:
            kept[trunk.first.request.client] += len(trunk.blocks)
        return max(trunks, key=lambda trunk: kept[trunk.first.request.client] / trunk.first.request.client_weight)

    def _end_early(self, trunk: SharedTrunk) -> None:
        self._counters.trunks_given_up += 1
        self._end([trunk])

    def _end(self, trunks: list[SharedTrunk]) -> None:
        for trunk in trunks:
            del self._end_of[trunk]
            self._pool.release(trunk.blocks)
            for block in trunk.blocks:
                self._holders[block] -= 1
                if not self._holders[block]:
                    del self._holders[block]
            self._sharing.unkeep(trunk)
        self._record_next()

    def _record_next(self) -> None:
        self.next_end_s = min(self._end_of.values(), default=None)
