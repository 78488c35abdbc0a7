"""Reference counts of KV blocks, and the prefix cache. Works on block ids only: the memory itself is in `storage`.

A block is in exactly one of three places:

    free    in `FreeRuns`. Its content is meaningless.
    held    by one or more tables. A held block with a name can be found by its prefix and shared.
    idle    named, without a holder. It can be found until it is evicted, the least recently used idle block first.

            take ───────────────► held ── release, last holder ──► idle if named, else free
            find + share: idle or held ► held                     idle ── evicted by take ──► free ► held

A block gets its name once its content is complete, and is never written after that. Only blocks of prompts get names
(see `block_names`). Other workers that read a block can see in the `Proof` if the block has been taken again.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain

from motet.block_names import BlockName
from motet.engines.native.kv.block_scores import BlockScores, ScoreNeeds
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored
from motet.transfer.proof import Proof
from motet.types import EncodedScore


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class OutOfBlocksError(Exception):
    """Fewer blocks are free than needed. No block was taken."""


class BlockPool:
    """The blocks of an engine. A caller that takes or shares blocks must release them."""

    def __init__(
        self, num_blocks: int, proof: Proof | None = None, *, on_take: Callable[[int], None] = lambda end: None
    ) -> None:
        """`proof`: updated before `take` returns a block. None if no other worker reads the blocks. `on_take`: called
        with the last id plus one of the blocks that are taken."""
        self.num_blocks = num_blocks
        self.proof = proof or Proof(num_blocks)
        self.num_gains = 0
        """Number of times that blocks can have become free or findable. While this number is unchanged, `take` and
        `find` cannot succeed where they failed before."""
        self.scores = BlockScores()
        self._on_take = on_take
        self._changes: list[BlockChange] = []
        self._evicted: list[BlockName] = []
        """Names of the blocks that were evicted after the last of `_changes`."""
        self._count = [0] * num_blocks
        """Number of tables that hold each block."""
        self._free = FreeRuns(num_blocks)
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Idle blocks, the least recently used block first."""
        self._name_of: dict[int, BlockName] = {}
        self._block_of: dict[BlockName, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` can return: free and idle blocks."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def holders(self) -> dict[int, int]:
        """Returns the number of tables that hold each held block."""
        return {block: count for block, count in enumerate(self._count) if count}

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """Returns `count` blocks with one holder each, as one run of neighbours if possible, preferably the run after
        block `after`. Evicts idle blocks if too few blocks are free. Raises OutOfBlocksError, and takes no block, if
        free and idle blocks together are too few."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks are needed, {self.num_free} of {self.num_blocks} are free")
        while len(self._free) < count:
            self._evict()
        blocks = self._free.take(count, after=after)
        for block in blocks:
            self._count[block] = 1
        self.proof.increment_generations(blocks)
        self._on_take(max(blocks, default=-1) + 1)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a holder to each block. Idle blocks become held."""
        for block in blocks:
            if self._count[block] == 0:
                del self._idle[block]  # KeyError: sharing a free block is a bug of the caller
            self._count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a holder from each block of a table. Later blocks, which are useless without the earlier ones, become
        idle first, so that they are evicted first."""
        self.num_gains += 1
        for block in reversed(blocks):
            if self._count[block] == 0:
                raise ValueError(f"block {block} is not held")
            self._count[block] -= 1
            if self._count[block]:
                continue
            if block in self._name_of:
                self._idle[block] = None
            else:
                self._free.add(block)

    def publish(self, blocks: Sequence[int], content: Stored) -> None:
        """Names held blocks whose content is complete, for `find`. A block stays unnamed if another has its name."""
        begin = 0
        for index, (block, name) in enumerate(zip(blocks, content.names, strict=True)):
            if not self._give_name(block, name):
                self._record_stored(content, range(begin, index))
                begin = index + 1
        self._record_stored(content, range(begin, len(blocks)))

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Returns the blocks of the longest known prefix of `names`, to be shared before the next `take`."""
        blocks = []
        for name in names:
            if (block := self._block_of.get(name)) is None:
                break
            blocks.append(block)
        return blocks

    def store_scores(self, name: BlockName, scores: Sequence[EncodedScore], *, needs: ScoreNeeds) -> None:
        """Keeps the scores of a block's tokens for as long as the block can be found."""
        if name in self._block_of:
            self.scores.store(name, scores, needs=needs)

    def forget(self) -> None:
        """Removes all names, so that no block can be found any more. Idle blocks become free, held blocks stay held."""
        self.num_gains += 1
        self._name_of.clear()
        self._block_of.clear()
        self.scores.clear()
        for block in self._idle:
            self._free.add(block)
        self._idle.clear()
        self._evicted.clear()
        self._changes = [Cleared()]

    def take_changes(self) -> list[BlockChange]:
        """Returns the changes of the prefix cache since the last call, in order."""
        if self._evicted:
            self._record_evicted()
        changes, self._changes = self._changes, []
        return changes

    def num_freed_by(self, tables: Sequence[Sequence[int]]) -> int:
        """Returns the number of blocks that only these tables hold."""
        holders = Counter(chain.from_iterable(tables))
        return sum(1 for block, count in holders.items() if self._count[block] == count)

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        name = self._name_of.pop(block)
        del self._block_of[name]
        self.scores.drop(name)
        self._evicted.append(name)
        self._free.add(block)

    def _give_name(self, block: int, name: BlockName) -> bool:
        """Names a block. Returns False if it has a name already, or if another block has this name."""
        if self._count[block] == 0:
            raise ValueError(f"block {block} is not held")
        if name in self._block_of or block in self._name_of:
            return False
        self._block_of[name] = block
        self._name_of[block] = name
        self.num_gains += 1
        return True

    def _record_stored(self, content: Stored, places: range) -> None:
        """Adds the blocks of `content` at these places to the changes."""
        if not places:
            return
        if self._evicted:
            self._record_evicted()
        self._changes.append(content if len(places) == len(content.names) else content.part(places.start, places.stop))

    def _record_evicted(self) -> None:
        self._changes.append(Removed(tuple(self._evicted)))
        self._evicted.clear()

    def check(self) -> None:
        """Raises AssertionError unless every block is in exactly one of the three places."""
        free = set(chain.from_iterable(range(begin, end) for begin, end in self._free.runs()))
        held = set(self.holders())
        idle = set(self._idle)
        if twice := free & held | free & idle | held & idle:
            raise AssertionError(f"blocks in two places: {sorted(twice)}")
        if len(free) + len(held) + len(idle) != self.num_blocks or len(free) != len(self._free):
            raise AssertionError("blocks were lost")
        if {name: block for block, name in self._name_of.items()} != self._block_of:
            raise AssertionError("the map from names to blocks is not the inverse of the map from blocks to names")
        if not idle <= self._name_of.keys() or free & self._name_of.keys():
            raise AssertionError("an idle block has no name, or a free block has one")
        self.scores.check(self._block_of)
        if min(self._count) < 0:
            raise AssertionError("a count is negative")


class FreeRuns:
    """A set of free block ids that provides runs of neighbours if possible: attention reads a trunk in one run without
    a gather. Runs are half-open, [begin, end), and never touch each other. They are found by length, in O(log number
    of lengths)."""

    def __init__(self, num_blocks: int) -> None:
        self._end_of: dict[int, int] = {}
        self._begin_of: dict[int, int] = {}
        self._by_length: dict[int, dict[int, None]] = {}
        """First blocks of the runs of each length, the newest run last."""
        self._lengths: list[int] = []
        """Keys of `_by_length`, sorted."""
        self._count = 0
        if num_blocks:
            self._insert(0, num_blocks)

    def __len__(self) -> int:
        """Number of free blocks."""
        return self._count

    def runs(self) -> list[tuple[int, int]]:
        """Returns all runs as (begin, end), in order of their ids."""
        return sorted(self._end_of.items())

    def add(self, block: int) -> None:
        """Adds one block, and joins it with the runs next to it."""
        begin, end = block, block + 1
        if block in self._begin_of:
            begin = self._begin_of[block]
            self._remove(begin)
        if end in self._end_of:
            follower = end
            end = self._end_of[follower]
            self._remove(follower)
        self._insert(begin, end)

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """Returns `count` blocks in one run if possible: from the run after block `after`, else from the smallest run
        that is long enough. Otherwise takes the longest runs. The caller has checked that enough blocks are free."""
        taken: list[int] = []
        if after is not None and count and self._end_of.get(after + 1, 0) - (after + 1) >= count:
            return self._cut(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            fit = bisect_left(self._lengths, missing)
            length = self._lengths[min(fit, len(self._lengths) - 1)]
            taken += self._cut(self._latest(length), min(missing, length))
        return taken

    def _latest(self, length: int) -> int:
        """Returns the newest run of this length. A dict finds its last key in constant time, but not its first."""
        same = self._by_length[length]
        begin, _ = same.popitem()
        same[begin] = None
        return begin

    def _cut(self, begin: int, count: int) -> list[int]:
        end = self._end_of[begin]
        self._remove(begin)
        if begin + count < end:
            self._insert(begin + count, end)
        return list(range(begin, begin + count))

    def _insert(self, begin: int, end: int) -> None:
        length = end - begin
        self._end_of[begin], self._begin_of[end] = end, begin
        if length not in self._by_length:
            self._by_length[length] = {}
            insort(self._lengths, length)
        self._by_length[length][begin] = None
        self._count += length

    def _remove(self, begin: int) -> None:
        end = self._end_of.pop(begin)
        del self._begin_of[end]
        length = end - begin
        same = self._by_length[length]
        del same[begin]
        if not same:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._count -= length
