"""Decides which trunks are read together. Trunks whose block tables have a common prefix form a tree of branches.

Trunks are cut into stretches at fixed positions. Adjacent trunks of a plan that have the same blocks in their first
stretches read these stretches together, in one branch:

    stretch         0                1                2
    rows of A   [ a a a a a a ]  [ b b b b b b ]  [ c c c c c c c c ]    branches: 0 of A, B and C; 1 of A and B;
    rows of B   [ a a a a a a ]  [ b b b b b b ]  [ d d d d d d ]                  2 of A; 2 of B; 1 of C
    rows of C   [ a a a a a a ]  [ e e e e e e e e ]

Sharing does not change any bits, because a row is merged from the stretches of its own trunk in their order. The
compiled kernels do the same (`csrc/trunks.h`); there, a branch can also end within a stretch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from motet.engines.native.attention.attention_plan import STRETCH, StretchRead, TrunkRead, num_stretches

MAX_BRANCH_LEVELS = 4
"""Maximum number of consecutive branches that a row shares with other trunks. It limits the number of items of a step,
so that a CUDA graph has capacity for all of them."""


@dataclass(frozen=True)
class SharingGain:
    """Parameters of a device that decide whether it is faster to read a branch together."""

    rows_at_once: int
    """Number of rows that one read of a key serves. Trunks with this number of rows each gain nothing from sharing."""
    min_keys_saved: int
    """Minimum number of key reads that a branch must save."""

    def allows(self, branch: "Branch") -> bool:
        alone = sum(self._readings(trunk.end - trunk.begin) for trunk in branch.trunks)
        saved = alone - self._readings(branch.end - branch.begin)
        return saved * (branch.end_key - branch.begin_key) >= self.min_keys_saved

    def _readings(self, rows: int) -> int:
        return -(-rows // self.rows_at_once)


@dataclass(frozen=True)
class Branch:
    """Stretches [first, last), that is keys [begin_key, end_key), of trunks that have the same blocks there. Rows
    [begin, end) of the batch read them."""

    trunks: Sequence[TrunkRead]
    first: int
    last: int

    @property
    def begin(self) -> int:
        return self.trunks[0].begin

    @property
    def end(self) -> int:
        return self.trunks[-1].end

    @property
    def begin_key(self) -> int:
        return self.first * STRETCH

    @property
    def end_key(self) -> int:
        num_keys = self.trunks[0].num_keys
        return num_keys if self.last == num_stretches(num_keys) else self.last * STRETCH

    def reads(self, block_size: int) -> Iterator[StretchRead]:
        """Yields one read of all stretches with `STRETCH` keys, and one of the last stretch if it has more keys."""
        table, size = self.trunks[0].table, STRETCH // block_size
        positions = tuple(chain.from_iterable(trunk.positions for trunk in self.trunks))
        rest = self.end_key - (self.last - 1) * STRETCH
        equal = self.last if rest == STRETCH else self.last - 1
        if equal > self.first:
            tables = tuple(table[at * size : (at + 1) * size] for at in range(self.first, equal))
            yield StretchRead(self.begin, self.end, positions, self.first, STRETCH, tables)
        if equal < self.last:
            yield StretchRead(self.begin, self.end, positions, equal, rest, (table[equal * size :],))


def branches(trunks: Sequence[TrunkRead], *, block_size: int, gain: SharingGain) -> list[Branch]:
    """Returns branches in which all rows read all keys of their trunks. A row's branches are in order of position.
    Except for comparing tables, the time for a trunk is independent of its length."""
    # Number of stretches that each trunk has in common with the previous trunk.
    num_common = [0, *(_num_common(before, trunk, block_size=block_size) for before, trunk in pairwise(trunks))]
    found: list[Branch] = []

    def add(begin: int, end: int, *, first: int, last: int) -> None:
        if first < last:
            found.append(Branch(trunks[begin:end], first, last))

    def build(begin: int, end: int, *, first: int, levels: int) -> None:
        """Adds the branches of trunks [begin, end), whose common stretches [0, first) already have branches."""
        if end - begin <= 1 or levels == 0:
            for at in range(begin, end):
                add(at, at + 1, first=first, last=num_stretches(trunks[at].num_keys))
            return
        common = min(num_common[begin + 1 : end])
        together = common > first and gain.allows(Branch(trunks[begin:end], first, common))
        if together:
            add(begin, end, first=first, last=common)
        forks = [begin, *(at for at in range(begin + 1, end) if num_common[at] == common), end]
        for fork, next_fork in pairwise(forks):
            build(fork, next_fork, first=common if together else first, levels=levels - (common > first))

    build(0, len(trunks), first=0, levels=MAX_BRANCH_LEVELS)
    return found


def keys_saved(branches: Sequence[Branch]) -> int:
    """Returns the number of keys that need not be read again, because the trunks of a branch read them together."""
    return sum((len(branch.trunks) - 1) * (branch.end_key - branch.begin_key) for branch in branches)


def _num_common(one: TrunkRead, other: TrunkRead, *, block_size: int) -> int:
    """Returns the number of leading stretches that two trunks have in common, by binary search."""
    if one.table[0] != other.table[0]:
        return 0
    if one.num_keys == other.num_keys and one.table == other.table:
        return num_stretches(one.num_keys)
    size = STRETCH // block_size
    low, high = 0, num_stretches(min(one.num_keys, other.num_keys)) - 1  # the last stretch ends with its trunk
    while low < high:
        middle = (low + high + 1) // 2
        equal = one.table[low * size : middle * size] == other.table[low * size : middle * size]
        low, high = (middle, high) if equal else (low, middle - 1)
    return low
