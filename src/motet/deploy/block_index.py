"""What becomes of a worker's prompt blocks goes into the index that routing looks into."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from motet.engines.base import Engine
from motet.kv_events.changes import BlockChange, BlockListener, Cleared, Removed, Stored
from motet.routing.prefix_index import PrefixIndex


@runtime_checkable
class TellsBlocks(Protocol):
    """An engine that says which prompt blocks it can find."""

    def listen_to_blocks(self, listener: BlockListener) -> None: ...


def follow_blocks(engine: Engine, index: PrefixIndex, id: str) -> None:
    """To be called before the engine is given a group."""
    if isinstance(engine, TellsBlocks):
        engine.listen_to_blocks(indexing(index, id))


def indexing(index: PrefixIndex, id: str) -> Callable[[Sequence[BlockChange]], None]:
    """A listener that keeps the index true for one worker."""
    return partial(_take, index, id)


def _take(index: PrefixIndex, id: str, changes: Sequence[BlockChange]) -> None:
    for change in changes:
        match change:
            case Stored():
                index.stored(id, change.names)
            case Removed():
                index.removed(id, change.names)
            case Cleared():
                index.cleared(id)
