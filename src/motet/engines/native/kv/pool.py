"""Who holds which block of KV cache. Numbers in, numbers out: the memory itself is in `storage`.

A block is in exactly one of three places:

    free    in `FreeRuns`; its content means nothing
    held    by `count` tables; a named one can be found by its prefix and shared
    idle    held by nobody, but named: its content may still be found, until it is evicted, least recently used first

            take ───────────────► held ── release, last holder ──► idle if named, else free
            find + share: idle or held ► held                     idle ── evicted by take ──► free ► held

A block is named only once its content is complete, and is never written after that. Names belong to prompt blocks: see
`prefix`. Whoever reads blocks from outside learns from the proof that one has been handed out again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from motet.block_names import BlockName
from motet.engines.native.kv.runs import FreeRuns
from motet.kv_events.changes import BlockChange, Removed, Stored
from motet.transfer.proof import Proof


class OutOfBlocksError(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockPool:
    """Reference counts of `num_blocks` blocks, and the prefix cache over them."""

    def __init__(self, num_blocks: int, proof: Proof | None = None) -> None:
        """`proof`: is told before a block is handed out; one of its own unless others are to read it."""
        self.num_blocks = num_blocks
        self.proof = proof or Proof(num_blocks)
        self.gains = 0
        """Rises whenever blocks may have become free or findable; `take` never finds more than before without that."""
        self._changes: list[BlockChange] = []
        self._evicted: list[BlockName] = []
        """Since the last of the changes."""
        self._count = [0] * num_blocks
        self._free = FreeRuns(num_blocks)
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._name_of: dict[int, BlockName] = {}
        self._block_of: dict[BlockName, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def holders(self) -> dict[int, int]:
        """How many tables hold each held block."""
        return {block: count for block, count in enumerate(self._count) if count}

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """`count` blocks with one holder each, contiguous where possible, best behind block `after`; idle blocks are
        evicted when the free ones do not suffice. All or nothing: `OutOfBlocksError`."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        while len(self._free) < count:
            self._evict()
        blocks = self._free.take(count, after=after)
        for block in blocks:
            self._count[block] = 1
        self.proof.raise_generations(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each; an idle block is held again."""
        for block in blocks:
            if self._count[block] == 0:
                del self._idle[block]  # KeyError: sharing a free block is a bug of the caller
            self._count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each. Call it in table order: later blocks become idle first and are evicted first,
        because a block is of no use without those before it."""
        self.gains += 1
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
        """Lets held, complete blocks be found. One whose name another has already stays nameless."""
        begin = 0
        for index, (block, name) in enumerate(zip(blocks, content.names, strict=True)):
            if not self._give_name(block, name):
                self._note_stored(content, begin, index)
                begin = index + 1
        self._note_stored(content, begin, len(blocks))

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Blocks of the longest known prefix of `names`. The caller shares what it uses before anything is taken."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take_changes(self) -> list[BlockChange]:
        """What can be found and what cannot any more since the last call, in the order in which it came about."""
        if self._evicted:
            self._note_evicted()
        changes, self._changes = self._changes, []
        return changes

    def num_idle_among(self, blocks: Sequence[int]) -> int:
        """How many of them `share` would take out of the free count."""
        return sum(1 for block in blocks if self._count[block] == 0)

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        name = self._name_of.pop(block)
        del self._block_of[name]
        self._evicted.append(name)
        self._free.add(block)

    def _give_name(self, block: int, name: BlockName) -> bool:
        """False if either has been given away."""
        if self._count[block] == 0:
            raise ValueError(f"block {block} is not held")
        if name in self._block_of or block in self._name_of:
            return False
        self._block_of[name] = block
        self._name_of[block] = name
        self.gains += 1
        return True

    def _note_stored(self, content: Stored, begin: int, end: int) -> None:
        if begin == end:
            return
        if self._evicted:
            self._note_evicted()
        self._changes.append(content if end - begin == len(content.names) else content.part(begin, end))

    def _note_evicted(self) -> None:
        self._changes.append(Removed(tuple(self._evicted)))
        self._evicted.clear()

    def check(self) -> None:
        """Raises `AssertionError` unless every block is in exactly one place."""
        free = set(chain.from_iterable(range(begin, end) for begin, end in self._free.runs()))
        held = set(self.holders())
        idle = set(self._idle)
        if twice := free & held | free & idle | held & idle:
            raise AssertionError(f"blocks in two places: {sorted(twice)}")
        if len(free) + len(held) + len(idle) != self.num_blocks or len(free) != len(self._free):
            raise AssertionError("blocks were lost")
        if {name: block for block, name in self._name_of.items()} != self._block_of:
            raise AssertionError("names and blocks disagree")
        if not idle <= self._name_of.keys() or free & self._name_of.keys():
            raise AssertionError("an idle block without a name, or a free one with a name")
        if min(self._count) < 0:
            raise AssertionError("a negative count")
