"""The set of blocks that can be found after a sequence of changes."""

from collections.abc import Sequence

from motet.block_names import BlockName
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored


def apply_to(names: set[BlockName], changes: Sequence[BlockChange]) -> None:
    """Applies the changes to `names`, the set of blocks that can be found."""
    for change in changes:
        match change:
            case Stored():
                names.update(change.names)
            case Removed():
                names.difference_update(change.names)
            case Cleared():
                names.clear()
