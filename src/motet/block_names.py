"""Names for the content of prompt blocks: each full block is named by a hash over itself and all before it.

    name(k) = blake2b(name(k - 1) + tokens of block k), name(-1) = the salt, keyed with the adapter if there is one

Two blocks of one name hold the same tokens at the same positions after the same prefix, so their KV is the same. 128
bits make a collision between honest prompts unthinkable and one on purpose infeasible.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

BlockName = bytes


def block_names(tokens: Sequence[int], block_size: int, salt: str) -> list[BlockName]:
    """Names of all full blocks of `tokens`, in order."""
    return list(named_blocks(tokens, block_size, salt))


def named_blocks(tokens: Sequence[int], block_size: int, salt: str, adapter: str = "") -> Iterator[BlockName]:
    """The same one by one, for who may need only the first ones."""
    return names_after(root_name(salt, adapter), tokens, block_size)


def root_name(salt: str, adapter: str = "") -> BlockName:
    """What stands for the blocks before the first one. KV that an adapter had a part in is not its base model's."""
    key = blake2b(adapter.encode(), digest_size=32).digest() if adapter else b""
    return blake2b(salt.encode(), digest_size=16, key=key).digest()


def names_after(name: BlockName, tokens: Sequence[int], block_size: int) -> Iterator[BlockName]:
    """Names of the full blocks of `tokens` that come after the block of `name`."""
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        name = blake2b(name + array("I", tokens[begin : begin + block_size]).tobytes(), digest_size=16).digest()
        yield name
