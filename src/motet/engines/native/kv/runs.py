"""Free block ids as maximal runs, so that a trunk can lie in one piece and attention can read it without a gather."""

from bisect import bisect_left, insort


class FreeRuns:
    """A set of block ids that hands out contiguous ones where it can.

    Runs are half-open, [begin, end), never touch each other, and are found by length: `take` costs O(log lengths)
    for each run it opens.
    """

    def __init__(self, num_blocks: int) -> None:
        self._end_of: dict[int, int] = {}
        self._begin_of: dict[int, int] = {}
        self._by_length: dict[int, dict[int, None]] = {}  # where runs of a length begin
        self._lengths: list[int] = []  # the keys of _by_length, sorted
        self._count = 0
        if num_blocks:
            self._insert(0, num_blocks)

    def __len__(self) -> int:
        """Number of free blocks."""
        return self._count

    def runs(self) -> list[tuple[int, int]]:
        """All runs in order of their ids."""
        return sorted(self._end_of.items())

    def add(self, block: int) -> None:
        """Returns one block; joins it with the runs beside it."""
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
        """`count` blocks, in one run if there is one: the run that follows block `after`, else the smallest that is
        long enough, else the longest ones. The caller has checked that there are enough."""
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
        """The run of this length that came last: a dict finds its last key at once, but walks over all that was deleted
        before its first."""
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
