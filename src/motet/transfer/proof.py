"""Numbers in registered memory by which a reader knows that it has read the blocks that it was promised.

    entry b                     generation of block b: raised before the block is handed out again
    entry num_blocks + slot     digest of the ticket whose lease is in that slot, 0 for none

A reader reads the data first and these numbers after it: a generation that is still the ticket's shows that no byte of
the block had been overwritten when the data was read. Generations begin at a random number at each start, so that those
of an earlier start never match. They stay below 2^53, digests below 2^63.
"""

import secrets
from array import array
from collections.abc import Iterable, Mapping

LEASE_SLOTS = 4096
GENERATION_BITS = 52
_NOTHING_SHOWN = bytes(array("q").itemsize * LEASE_SLOTS)


class Proof:
    """Owned by the engine core; its memory never moves."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        first = secrets.randbits(GENERATION_BITS - 1)  # the other half of the range is left for counting up
        self._entries = array("q", [first] * num_blocks + [0] * LEASE_SLOTS)
        self._slots_used = 0
        """Slots from this number on have never been used."""
        self._free_slots: list[int] = []
        """Slots below `_slots_used` that are free again."""

    @property
    def address(self) -> int:
        return self._entries.buffer_info()[0]

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def has_room(self) -> bool:
        """True if there is a slot for another lease."""
        return bool(self._free_slots) or self._slots_used < LEASE_SLOTS

    def raise_generations(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._entries[block] += 1

    def generations(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._entries[block] for block in blocks)

    def take_slot(self) -> int:
        """Returns a slot for a lease; it shows nothing yet."""
        if self._free_slots:
            return self._free_slots.pop()
        if self._slots_used == LEASE_SLOTS:
            raise IndexError(f"all {LEASE_SLOTS} lease slots are taken")
        self._slots_used += 1
        return self._slots_used - 1

    def show(self, slot: int, digest: int) -> None:
        self._entries[self.num_blocks + slot] = digest

    def hide(self, slot: int) -> None:
        self._entries[self.num_blocks + slot] = 0
        self._free_slots.append(slot)

    def check(self, shown: Mapping[int, int]) -> None:
        """Raises AssertionError unless exactly these digests are shown, by slot, and every other slot is free."""
        if sorted([*self._free_slots, *shown]) != list(range(self._slots_used)):
            raise AssertionError("lease slots were lost, or are in two places")
        expected = array("q", _NOTHING_SHOWN)
        for slot, digest in shown.items():
            expected[slot] = digest
        if self._entries[self.num_blocks :] != expected or 0 in shown.values():
            raise AssertionError("the proof shows other leases than those that are held")
