"""The set of blocks that can be found, as the changes tell."""

from collections.abc import Sequence

from motet.block_names import BlockName
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored


def apply_to(names: set[BlockName], changes: Sequence[BlockChange]) -> None:
    """Keeps `names` the set of blocks that can be found."""
    for change in changes:
        match change:
            case Stored():
                names.update(change.names)
            case Removed():
                names.difference_update(change.names)
            case Cleared():
                names.clear()
