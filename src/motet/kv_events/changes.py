"""Changes of the blocks that a prefix cache can find, in order.

The engine process sends them as msgspec messages. Applying them is idempotent: a block can be stored twice and removed
twice, as other engines do when a block is used again."""

from collections.abc import Callable, Sequence

import msgspec

from motet.block_names import BlockName


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks of one prompt can be found from now on."""

    names: tuple[BlockName, ...]
    parent: BlockName | None
    """Block before the first one; None at the start of a prompt, and if the tokens are not included."""
    token_ids: tuple[int, ...]
    """Token ids of all the blocks; empty if they are not included."""
    salted: bool = False
    """True if the prompt had a `cache_salt` or an adapter: blocks with the same tokens have other names without it."""

    def part(self, start: int, end: int) -> "Stored":
        """Returns the change for blocks [start, end)."""
        size = len(self.token_ids) // len(self.names)
        parent = self.names[start - 1] if start else self.parent
        return Stored(self.names[start:end], parent, self.token_ids[start * size : end * size], self.salted)


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """These blocks cannot be found any more."""

    names: tuple[BlockName, ...]


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No block can be found any more, or it is unknown which ones can."""


BlockChange = Stored | Removed | Cleared

BlockListener = Callable[[Sequence[BlockChange]], None]
"""Called with the changes of one worker, in order. Must neither block nor raise."""
