"""Trunks that are kept after their groups, so that a client can request more choices of the same prompt (`keep_s`).

A new group joins a kept trunk like the trunk of a running group, and computes only the last token of the prompt. A kept
trunk holds its blocks until it expires. It is evicted before that in two cases:

    blocks are needed          Idle blocks of the prefix cache are evicted first. A trunk that a running group shares is
                               not evicted, because this would free no block.
    `--keep-gb` is exceeded    All blocks of kept trunks count, each once. Trunks that running groups share are evicted
                               last.

The least recently used trunk of the client that keeps the most blocks for its weight is evicted first. A trunk is in
use while a running group shares it. The full blocks of an evicted or expired trunk stay in the prefix cache.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.scheduling.sharing import SharedTrunk, Sharing
from motet.engines.native.step.sequence import Group
from motet.metrics.stats import EngineStats


class KeptTrunks:
    """The kept trunks, whose blocks it holds. Owned by the scheduler."""

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
        self._expiries_s: dict[SharedTrunk, float] = {}
        """Time at which each kept trunk expires, the least recently used trunk first."""
        self._holders = Counter[int]()
        """Number of kept trunks that hold each block."""
        self.next_expiry_s: float | None = None
        """Time at which the next kept trunk expires; None if no trunk is kept."""

    def __len__(self) -> int:
        return len(self._expiries_s)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that only kept trunks hold."""
        return self._pool.num_freed_by(self.tables())

    def tables(self) -> list[list[int]]:
        return [trunk.blocks for trunk in self._expiries_s]

    def keep(self, trunk: SharedTrunk, seconds: float) -> None:
        """Keeps a complete trunk for `seconds` from now, or until it expires if that is later. A trunk of more than
        `max_blocks` is not kept."""
        if len(trunk.blocks) > self._max_blocks:
            self._counters.trunks_given_up += 1
            return
        if trunk not in self._expiries_s:
            self._pool.share(trunk.blocks)
            self._holders.update(trunk.blocks)
            trunk.kept = True
        self._expiries_s[trunk] = max(self._clock() + seconds, self._expiries_s.pop(trunk, 0.0))
        while len(self._holders) > self._max_blocks:
            unused = [kept for kept in self._expiries_s if not kept.groups]
            self._evict(self._next_to_evict(unused or [*self._expiries_s]))
        self._record_next()

    def used_by(self, group: Group) -> None:
        """Called when a group stops using its trunk. A kept trunk becomes the most recently used one."""
        trunk = self._sharing.trunk_of(group)
        if trunk is not None and trunk in self._expiries_s:
            self._expiries_s[trunk] = self._expiries_s.pop(trunk)

    def release_expired(self) -> None:
        if self.next_expiry_s is not None and self.next_expiry_s <= (now_s := self._clock()):
            self._release([trunk for trunk, expiry_s in self._expiries_s.items() if expiry_s <= now_s])

    def ensure_free(self, num_blocks: int, *, exempt: SharedTrunk | None = None) -> bool:
        """Returns True if the pool has `num_blocks` free blocks. Evicts kept trunks if necessary, except `exempt` and
        trunks that running groups share. Evicts none if all of them would free too few blocks."""
        if self._pool.num_free >= num_blocks:
            return True
        unused = [trunk for trunk in self._expiries_s if not trunk.groups and trunk is not exempt]
        if self._pool.num_free + self._pool.num_freed_by([trunk.blocks for trunk in unused]) < num_blocks:
            return False
        while self._pool.num_free < num_blocks:
            trunk = self._next_to_evict(unused)
            unused.remove(trunk)
            self._evict(trunk)
        return True

    def release_adapter(self, digest: str) -> None:
        """Releases the kept trunks of an adapter."""
        self._release([trunk for trunk in self._expiries_s if trunk.first.trunk.adapter_digest == digest])

    def release_all(self) -> None:
        self._release(list(self._expiries_s))

    def check(self) -> None:
        """Raises AssertionError unless the counts of blocks, their limit, and `next_expiry_s` are correct."""
        if self._holders != Counter(chain.from_iterable(self.tables())):
            raise AssertionError("the counted blocks are not the blocks of the kept trunks")
        if len(self._holders) > self._max_blocks:
            raise AssertionError(f"{len(self._holders)} blocks are kept, the maximum is {self._max_blocks}")
        if self.next_expiry_s != min(self._expiries_s.values(), default=None):
            raise AssertionError("a kept trunk would not expire at its time")

    def _next_to_evict(self, trunks: Sequence[SharedTrunk]) -> SharedTrunk:
        """Returns the least recently used of these trunks that belongs to the client that keeps the most blocks for its
        weight. `trunks`: in order of use."""
        kept = Counter[str]()
        for trunk in self._expiries_s:
            kept[trunk.first.request.client] += len(trunk.blocks)
        return max(trunks, key=lambda trunk: kept[trunk.first.request.client] / trunk.first.request.client_weight)

    def _evict(self, trunk: SharedTrunk) -> None:
        self._counters.trunks_given_up += 1
        self._release([trunk])

    def _release(self, trunks: list[SharedTrunk]) -> None:
        for trunk in trunks:
            del self._expiries_s[trunk]
            self._pool.release(trunk.blocks)
            for block in trunk.blocks:
                self._holders[block] -= 1
                if not self._holders[block]:
                    del self._holders[block]
            self._sharing.unkeep(trunk)
        self._record_next()

    def _record_next(self) -> None:
        self.next_expiry_s = min(self._expiries_s.values(), default=None)
