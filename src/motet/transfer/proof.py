"""Numbers in registered memory by which a reader knows that what it has read is what it was promised.

    entry b                     generation of block b: raised before the block is handed out again
    entry num_blocks + slot     digest of the ticket whose lease is in that slot, 0 for none

A reader reads data first and these after it: a generation that is still the ticket's shows that no byte of the block
had been overwritten when the data was read. Generations begin at a number drawn at each start, so that those of an
earlier start never match. They stay below 2^53, digests below 2^63.
"""

import secrets
from array import array
from collections.abc import Iterable, Mapping

LEASE_SLOTS = 4096
GENERATION_BITS = 52
_NOTHING_SHOWN = bytes(array("q").itemsize * LEASE_SLOTS)


class Proof:
    """Owned by the engine core; never moves."""

    def __init__(self, num_blocks: int, *, first_generation: int | None = None) -> None:
        self.num_blocks = num_blocks
        # Half the range is left to count up in.
        first = secrets.randbits(GENERATION_BITS - 1) if first_generation is None else first_generation
        self._entries = array("q", [first] * num_blocks + [0] * LEASE_SLOTS)
        self._slots_used = 0
        """No slot from here on has shown anything yet."""
        self._free_slots: list[int] = []
        """Those before it that show nothing any more."""

    @property
    def address(self) -> int:
        return self._entries.buffer_info()[0]

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def has_room(self) -> bool:
        """Whether another lease fits."""
        return bool(self._free_slots) or self._slots_used < LEASE_SLOTS

    def raise_generations(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._entries[block] += 1

    def generations(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._entries[block] for block in blocks)

    def show(self, lease_id: int) -> int:
        """Puts a lease into a free slot, which is returned."""
        if self._free_slots:
            slot = self._free_slots.pop()
        elif self._slots_used < LEASE_SLOTS:
            slot, self._slots_used = self._slots_used, self._slots_used + 1
        else:
            raise IndexError(f"all {LEASE_SLOTS} lease slots are taken")
        self._entries[self.num_blocks + slot] = lease_id
        return slot

    def reshow(self, slot: int, number: int) -> None:
        """Puts something else into a slot that is taken."""
        self._entries[self.num_blocks + slot] = number

    def hide(self, slot: int) -> None:
        self._entries[self.num_blocks + slot] = 0
        self._free_slots.append(slot)

    def lease_entry(self, slot: int) -> int:
        return self.num_blocks + slot

    def check(self, shown: Mapping[int, int]) -> None:
        """Raises AssertionError unless exactly these leases are shown, by slot, and every other slot is free."""
        if sorted([*self._free_slots, *shown]) != list(range(self._slots_used)):
            raise AssertionError("lease slots were lost, or are in two places")
        expected = array("q", _NOTHING_SHOWN)
        for slot, lease_id in shown.items():
            expected[slot] = lease_id
        if self._entries[self.num_blocks :] != expected or 0 in shown.values():
            raise AssertionError("the proof shows other leases than are held")
