"""What happened to the blocks that a prefix cache can find, in the order in which it happened.

They travel as msgspec messages from the engine process on. Applying them is idempotent: a block may be stored twice
and removed twice, as other engines do when they tell of a block again because it was used again.
"""

from collections.abc import Callable, Sequence

import msgspec

from motet.block_names import BlockName


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks of one prompt can be found from now on."""

    names: tuple[BlockName, ...]
    parent: BlockName | None
    """The block before the first; None at the beginning of a prompt, and where the tokens are not told."""
    token_ids: tuple[int, ...]
    """Of all the blocks; empty where they are not told."""
    salted: bool = False
    """The prompt had a `cache_salt`: the same tokens without it have other names."""

    def part(self, begin: int, end: int) -> "Stored":
        """Blocks `begin` to `end`, not included."""
        size = len(self.token_ids) // len(self.names)
        parent = self.names[begin - 1] if begin else self.parent
        return Stored(self.names[begin:end], parent, self.token_ids[begin * size : end * size], self.salted)


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """They cannot be found any more."""

    names: tuple[BlockName, ...]


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """None can be found any more, or it is not known which."""


BlockChange = Stored | Removed | Cleared

BlockListener = Callable[[Sequence[BlockChange]], None]
"""Is told of the changes of one worker, in order. Must neither block nor raise."""


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
