"""What becomes of a worker's prompt blocks goes into the index that routing looks into."""

from collections.abc import Sequence
from functools import partial

from motet.kv_events.changes import BlockChange, BlockListener, Cleared, Removed, Stored
from motet.routing.prefix_index import PrefixIndex


def indexing(index: PrefixIndex, id: str) -> BlockListener:
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
