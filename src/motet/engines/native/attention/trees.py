"""Which trunks are read together: those whose block tables begin alike, as the branches of a tree do.

Trunks are cut into stretches at fixed places. Neighbours in a plan that have the same blocks in some stretches, from
the first on, read these together, in one branch:

    stretch         0                1                2
    rows of A   [ a a a a a a ]  [ b b b b b b ]  [ c c c c c c c c ]    branches: 0 of A, B and C; 1 of A and B;
    rows of B   [ a a a a a a ]  [ b b b b b b ]  [ d d d d d d ]                  2 of A; 2 of B; 1 of C
    rows of C   [ a a a a a a ]  [ e e e e e e e e ]

Who shares what changes no bits: a row is merged from the stretches of its own trunk, in their order. The compiled
kernels do the same (`csrc/trunks.h`); there a branch may also end within a stretch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from motet.engines.native.attention.attention_plan import STRETCH, StretchRead, TrunkRead, num_stretches

MOST_LEVELS = 4
"""Most branches, one behind the other, that a row shares with others. So a step has few items more than rows, and a
graph has room for all of them."""


@dataclass(frozen=True)
class SharingGain:
    """What a device gains by reading together. Keys are read once for `rows_at_once` rows, so groups that have so many
    each gain nothing; a branch must save `least_keys` readings of a key."""

    rows_at_once: int
    least_keys: int

    def allows(self, branch: "Branch") -> bool:
        alone = sum(self._readings(trunk.end - trunk.begin) for trunk in branch.trunks)
        saved = alone - self._readings(branch.end - branch.begin)
        return saved * (branch.end_key - branch.begin_key) >= self.least_keys

    def _readings(self, rows: int) -> int:
        return -(-rows // self.rows_at_once)


@dataclass(frozen=True)
class Branch:
    """Stretches [first, last) of trunks that have the same blocks there; their rows are neighbours in the batch."""

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
        """Yields one read of all stretches of `STRETCH` keys, and one of the last stretch if it has another number."""
        table, size = self.trunks[0].table, STRETCH // block_size
        positions = tuple(chain.from_iterable(trunk.positions for trunk in self.trunks))
        rest = self.end_key - (self.last - 1) * STRETCH
        equal = self.last if rest == STRETCH else self.last - 1
        if equal > self.first:
            tables = tuple(table[at * size : (at + 1) * size] for at in range(self.first, equal))
            yield StretchRead(self.begin, self.end, positions, self.first, STRETCH, tables)
        if equal < self.last:
            yield StretchRead(self.begin, self.end, positions, equal, rest, (table[equal * size :],))


def branches(trunks: Sequence[TrunkRead], *, block_size: int, worth: SharingGain) -> list[Branch]:
    """Returns the branches in which all rows read all keys of their trunks; those of each row in order of position."""
    return _Tree(trunks, block_size=block_size, worth=worth).branches


def keys_joined(branches: Sequence[Branch]) -> int:
    """Returns the number of keys that trunks did not read, because another one read them in the same branch."""
    return sum((len(branch.trunks) - 1) * (branch.end_key - branch.begin_key) for branch in branches)


class _Tree:
    """Grows branches over trunks. The work for each trunk does not grow with its length, but for comparing tables."""

    def __init__(self, trunks: Sequence[TrunkRead], *, block_size: int, worth: SharingGain) -> None:
        self._trunks = trunks
        self._worth = worth
        self._common = [0, *(_num_common(one, other, block_size=block_size) for one, other in pairwise(trunks))]
        """For each trunk, how many stretches it has in common with the one before it."""
        self.branches: list[Branch] = []
        self._grow(0, len(trunks), first=0, levels=MOST_LEVELS)

    def _grow(self, begin: int, end: int, *, first: int, levels: int) -> None:
        """Adds the branches of trunks [begin, end), which are read up to stretch `first` and have it in common."""
        if end - begin <= 1 or levels == 0:
            for at in range(begin, end):
                self._add(at, at + 1, first=first, last=num_stretches(self._trunks[at].num_keys))
            return
        common = min(self._common[begin + 1 : end])
        together = common > first and self._worth.allows(Branch(self._trunks[begin:end], first, common))
        if together:
            self._add(begin, end, first=first, last=common)
        forks = [begin, *(at for at in range(begin + 1, end) if self._common[at] == common), end]
        for one, other in pairwise(forks):
            self._grow(one, other, first=common if together else first, levels=levels - (common > first))

    def _add(self, begin: int, end: int, *, first: int, last: int) -> None:
        if first < last:
            self.branches.append(Branch(self._trunks[begin:end], first, last))


def _num_common(one: TrunkRead, other: TrunkRead, *, block_size: int) -> int:
    """Returns how many stretches two trunks have in common, from the first on. It is found by halving."""
    if one.table[0] != other.table[0]:
        return 0
    if one.num_keys == other.num_keys and one.table == other.table:
        return num_stretches(one.num_keys)
    size = STRETCH // block_size
    low, high = 0, num_stretches(min(one.num_keys, other.num_keys)) - 1  # a last stretch ends where its trunk does
    while low < high:
        middle = (low + high + 1) // 2
        equal = one.table[low * size : middle * size] == other.table[low * size : middle * size]
        low, high = (middle, high) if equal else (low, middle - 1)
    return low
