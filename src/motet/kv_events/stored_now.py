"""What all changes so far add up to, with enough of each block to tell of it again."""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from motet.block_names import BlockName
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored

MOST_BLOCKS_OF_A_CHANGE = 256
"""So that telling of everything can be cut into pieces."""


class _Block(NamedTuple):
    parent: BlockName | None
    tokens: bytes
    """Unsigned 32-bit numbers: an eighth of what a tuple of them takes."""
    salted: bool


class StoredNow:
    """The blocks that can be found now, in the order in which they were stored."""

    def __init__(self) -> None:
        self._blocks: dict[BlockName, _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def salted_among(self, names: Iterable[BlockName]) -> set[BlockName]:
        return {name for name in names if (block := self._blocks.get(name)) is not None and block.salted}

    def apply(self, change: BlockChange) -> None:
        match change:
            case Stored():
                self._store(change)
            case Removed():
                for name in change.names:
                    self._blocks.pop(name, None)
            case Cleared():
                self._blocks.clear()

    def changes(self) -> Iterator[Stored]:
        """Brings whoever knows nothing to where we are. As of when it is called, whatever is applied meanwhile."""
        return _runs(list(self._blocks.items()))

    def _store(self, stored: Stored) -> None:
        tokens = array("I", stored.token_ids).tobytes()
        size = len(tokens) // len(stored.names)
        parent = stored.parent
        for index, name in enumerate(stored.names):
            self._blocks.setdefault(name, _Block(parent, tokens[index * size : (index + 1) * size], stored.salted))
            parent = name


def _runs(blocks: list[tuple[BlockName, _Block]]) -> Iterator[Stored]:
    run: list[tuple[BlockName, _Block]] = []
    for name, block in blocks:
        if run and (block.parent != run[-1][0] or len(run) == MOST_BLOCKS_OF_A_CHANGE):
            yield _joined(run)
            run = []
        run.append((name, block))
    if run:
        yield _joined(run)


def _joined(run: list[tuple[BlockName, _Block]]) -> Stored:
    tokens = array("I", b"".join(block.tokens for _, block in run))
    return Stored(tuple(name for name, _ in run), run[0][1].parent, tuple(tokens), run[0][1].salted)
