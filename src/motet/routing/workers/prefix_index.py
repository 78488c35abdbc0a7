"""An index of the prompt blocks that workers have, in their KV caches or for open groups.

The name of a block also depends on all tokens before it (`motet.block_names`). So the index is flat, and a lookup
follows the prompt's names until no worker is left:

    name 0   {a, b, c}      a, b and c have it
    name 1   {a, b}         c has 1 block
    name 2   {a}            b has 2
    name 3   -              a has 3

The workers that have a name are the bits of an integer, so each step of a lookup is one dictionary access and one
`and`, whatever the number of workers.
"""

from collections.abc import Iterable
from itertools import compress

from motet.block_names import BlockName

FEW = 16
"""Maximum number of workers that are read from an integer bit by bit. For more, the integer becomes a string."""
BITS = bytes.maketrans(b"01", b"\0\1")


class PrefixIndex:
    """The blocks of each worker, and the workers that have each block. Pure: does not read events itself."""

    def __init__(self) -> None:
        self._holders: dict[BlockName, int] = {}
        self._names: dict[str, set[BlockName]] = {}
        self._bits: dict[str, int] = {}
        self._workers: list[str] = []
        """The worker of each bit. A free bit still has its last worker, to which no block refers."""
        self._free: list[int] = []

    def __len__(self) -> int:
        """Returns the number of names that any worker has."""
        return len(self._holders)

    def stored(self, worker: str, names: Iterable[BlockName]) -> None:
        """Records that the worker has these blocks now. A second time changes nothing."""
        bit, known, holders = self._bit(worker), self._names[worker], self._holders
        for name in names:
            known.add(name)
            others = holders.get(name)
            holders[name] = bit if others is None else others | bit

    def removed(self, worker: str, names: Iterable[BlockName]) -> None:
        """Records that the worker does not have these blocks any more. Ignores unknown blocks."""
        known = self._names.get(worker)
        if known is None:
            return
        bit = self._bits[worker]
        for name in names:
            if name in known:
                known.remove(name)
                self._remove_holder(name, bit)

    def cleared(self, worker: str) -> None:
        """Removes all blocks of a worker that has left or starts again."""
        known = self._names.pop(worker, None)
        if known is None:
            return
        bit = self._bits.pop(worker)
        for name in known:
            self._remove_holder(name, bit)
        self._free.append(bit.bit_length() - 1)

    def blocks(self, worker: str) -> int:
        return len(self._names.get(worker, ()))

    def overlap(self, names: Iterable[BlockName]) -> dict[str, int]:
        """Returns the number of leading blocks that each worker has, ascending. Workers without any are left out."""
        counts: dict[str, int] = {}
        left, count = 0, 0
        for name in names:
            holders = self._holders.get(name, 0)
            if count:
                holders &= left
            if holders != left:
                counts.update(dict.fromkeys(self._workers_of(left & ~holders), count))
            left = holders
            if not left:
                return counts
            count += 1
        return counts | dict.fromkeys(self._workers_of(left), count)

    def check(self) -> None:
        """Raises AssertionError unless the maps of both directions agree."""
        held = sum(holders.bit_count() for holders in self._holders.values())
        if held != sum(map(len, self._names.values())):
            raise AssertionError("blocks by name and by worker do not add up")
        for worker, names in self._names.items():
            if not all(self._holders.get(name, 0) & self._bits[worker] for name in names):
                raise AssertionError(f"{worker} has blocks that do not name it")

    def _bit(self, worker: str) -> int:
        if worker not in self._bits:
            number = self._free.pop() if self._free else len(self._workers)
            self._workers[number : number + 1] = [worker]
            self._bits[worker] = 1 << number
            self._names[worker] = set()
        return self._bits[worker]

    def _remove_holder(self, name: BlockName, bit: int) -> None:
        others = self._holders[name] ^ bit
        if others:
            self._holders[name] = others
        else:
            del self._holders[name]

    def _workers_of(self, holders: int) -> Iterable[str]:
        if holders.bit_count() > FEW:
            bits = f"{holders:b}"[::-1].encode().translate(BITS)
            return compress(self._workers, bits)
        workers = []
        while holders:
            lowest = holders & -holders
            workers.append(self._workers[lowest.bit_length() - 1])
            holders ^= lowest
        return workers
