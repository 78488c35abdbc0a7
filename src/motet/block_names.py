"""Names for the content of prompt blocks: each full block is named by a hash of itself and of all blocks before it.

    name(k) = blake2b(name(k - 1) + tokens of block k), name(-1) = the salt, keyed with the adapter and the weights

Two blocks with the same name have the same tokens at the same positions after the same prefix under the same weights,
so their KV is the same. With 128 bits a collision by chance will not happen, and nobody can compute one. The weights
are named once an engine has got new ones: until then its blocks are those of the weights it was started with.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

BlockName = bytes


def block_names(tokens: Sequence[int], block_size: int, *, salt: str, weights: str = "") -> list[BlockName]:
    """Returns the names of all full blocks of `tokens`, in order."""
    return list(named_blocks(tokens, block_size, salt=salt, weights=weights))


def named_blocks(
    tokens: Sequence[int], block_size: int, *, salt: str, adapter: str = "", weights: str = ""
) -> Iterator[BlockName]:
    """Yields the same names one by one, for callers that may need only the first ones."""
    return names_after(root_name(salt, adapter, weights=weights), tokens, block_size=block_size)


def root_name(salt: str, adapter: str = "", *, weights: str = "") -> BlockName:
    """Returns the name before the first block. It depends on the adapter, whose KV is not that of its base model."""
    of = f"{adapter}\0{weights}" if weights else adapter
    key = blake2b(of.encode(), digest_size=32).digest() if of else b""
    return blake2b(salt.encode(), digest_size=16, key=key).digest()


def names_after(name: BlockName, tokens: Sequence[int], *, block_size: int) -> Iterator[BlockName]:
    """Yields the names of the full blocks of `tokens` that come after the block of `name`."""
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        name = blake2b(name + array("I", tokens[begin : begin + block_size]).tobytes(), digest_size=16).digest()
        yield name
