"""The proof: numbers in registered memory that show a reader that it has read the blocks of its ticket.

    entry b                     generation of block b
    entry num_blocks + slot     digest of the ticket whose lease has that slot, 0 for a free slot

1. The owner increments a block's generation each time before the block is reused.
2. The owner publishes the digest of a ticket when it grants the lease, and clears the slot when the lease ends.
3. A reader reads the data first and these numbers after it. If the generations equal the ticket's, no byte of the
   blocks had been overwritten when the data was read. If the digest is the ticket's, the lease was still held.

Generations start at a random number each time the worker starts, so that the generations of an earlier start never
match. They stay below 2^53, digests below 2^63.
"""

import secrets
from array import array
from collections.abc import Iterable, Mapping

LEASE_SLOTS = 4096
GENERATION_BITS = 52
_ALL_FREE = bytes(array("q").itemsize * LEASE_SLOTS)


class Proof:
    """The entries and the lease slots. Owned by the engine core; the memory of the entries never moves."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        first = secrets.randbits(GENERATION_BITS - 1)  # the upper half of the range is left for counting
        self._entries = array("q", [first] * num_blocks + [0] * LEASE_SLOTS)
        self._num_slots_used = 0
        """Slots from this number on have never been used."""
        self._free_slots: list[int] = []
        """Slots below `_num_slots_used` that are free again."""

    @property
    def address(self) -> int:
        return self._entries.buffer_info()[0]

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots) or self._num_slots_used < LEASE_SLOTS

    def increment_generations(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._entries[block] += 1

    def generations(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._entries[block] for block in blocks)

    def allocate_slot(self) -> int:
        """Returns a free slot for a lease. Its entry is 0 until `publish`."""
        if self._free_slots:
            return self._free_slots.pop()
        if self._num_slots_used == LEASE_SLOTS:
            raise IndexError(f"all {LEASE_SLOTS} lease slots are in use")
        self._num_slots_used += 1
        return self._num_slots_used - 1

    def publish(self, slot: int, digest: int) -> None:
        self._entries[self.num_blocks + slot] = digest

    def free_slot(self, slot: int) -> None:
        """Clears the entry of a slot, and frees the slot for another lease."""
        self._entries[self.num_blocks + slot] = 0
        self._free_slots.append(slot)

    def check(self, published: Mapping[int, int]) -> None:
        """Raises AssertionError unless exactly these digests are published, by slot, and every other slot is free."""
        if sorted([*self._free_slots, *published]) != list(range(self._num_slots_used)):
            raise AssertionError("a lease slot is neither free nor published, or is both")
        expected = array("q", _ALL_FREE)
        for slot, digest in published.items():
            expected[slot] = digest
        if self._entries[self.num_blocks :] != expected or 0 in published.values():
            raise AssertionError("the digests in the proof do not match the leases that are held")
