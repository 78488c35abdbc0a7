"""Changes of the blocks that a prefix cache can find, in order.

They travel as msgspec messages from the engine process on. Applying them is idempotent: a block may be stored twice
and removed twice, as other engines do when a block is used again.
"""

from collections.abc import Callable, Sequence

import msgspec

from motet.block_names import BlockName


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks of one prompt can be found from now on."""

    names: tuple[BlockName, ...]
    parent: BlockName | None
    """The block before the first; None at the beginning of a prompt, and if the tokens are not given."""
    token_ids: tuple[int, ...]
    """Token ids of all the blocks; empty if they are not given."""
    salted: bool = False
    """The prompt had a `cache_salt`: the same tokens without it have other names."""

    def part(self, begin: int, end: int) -> "Stored":
        """Returns the change for blocks [begin, end)."""
        size = len(self.token_ids) // len(self.names)
        parent = self.names[begin - 1] if begin else self.parent
        return Stored(self.names[begin:end], parent, self.token_ids[begin * size : end * size], self.salted)


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """These blocks cannot be found any more."""

    names: tuple[BlockName, ...]


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No block can be found any more, or it is unknown which ones can."""


BlockChange = Stored | Removed | Cleared

BlockListener = Callable[[Sequence[BlockChange]], None]
"""Called with the changes of one worker, in order. Must neither block nor raise."""
