"""Lets answers into the prefix cache, for conversations in which the last answer is part of the next prompt.

Off unless asked for: the KV of an answer was computed as trunk and tail, and is not bit for bit the KV that the same
tokens get as a prompt, so a choice may then depend on what was served before.
"""

from collections.abc import Callable

from motet.block_names import block_names
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.sequence import Sequence
from motet.kv_events.changes import Stored

CopySlots = Callable[[list[int], list[int]], None]
"""Copies the KV of slots, source to target, in all layers."""


class AnswerCache:
    """Copies an answer's KV into blocks of its own, cut where prompt blocks are cut, and publishes them.

    A tail starts in a fresh block wherever its trunk ends, so its blocks cannot be shared as they are:

        trunk  [p p p p][p p . .]            cut as a prompt  [p p p p][p p w w][w w w .]
        tail             [w w w w][w . . .]
    """

    def __init__(self, pool: BlockPool, block_size: int, copy: CopySlots) -> None:
        self._pool = pool
        self._block_size = block_size
        self._copy = copy

    def keep(self, sequence: Sequence) -> None:
        """Call it while the sequence still holds its blocks. Does nothing when blocks are short."""
        group, size = sequence.group, self._block_size
        known = (*group.prompt, *sequence.written[: sequence.computed])
        names = block_names(known, size, group.request.cache_salt)
        first = max(len(group.prompt) // size, len(self._pool.find(names)))
        if first >= len(names) or len(names) - first > self._pool.num_free:
            return
        blocks = self._pool.take(len(names) - first)
        positions = range(first * size, len(names) * size)
        self._copy(
            [self._slot(sequence, position) for position in positions],
            [block * size + offset for block in blocks for offset in range(size)],
        )
        parent = names[first - 1] if first else None
        salted = bool(group.request.cache_salt)
        self._pool.publish(
            blocks, Stored(tuple(names[first:]), parent, known[first * size : len(names) * size], salted)
        )
        self._pool.release(blocks)

    def _slot(self, sequence: Sequence, position: int) -> int:
        trunk_tokens = len(sequence.group.prompt)
        table, offset = (
            (sequence.group.blocks, position) if position < trunk_tokens else (sequence.blocks, position - trunk_tokens)
        )
        return table[offset // self._block_size] * self._block_size + offset % self._block_size
