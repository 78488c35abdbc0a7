"""Names of prompt blocks by content: the name of a full block is a hash of its tokens and of all blocks before it.

    name(k) = blake2b(name(k - 1) + tokens of block k), name(-1) = the salt, keyed with the adapter and the weights

Two blocks with the same name have the same tokens at the same positions after the same prefix under the same weights,
so their KV is the same. With 128 bits a collision does not happen by chance and cannot be computed. The key contains
the weights only after an engine's weights were updated; the initial weights have an empty name."""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

BlockName = bytes
TOKEN_BYTES = array("I").itemsize


def block_names(
    tokens: Sequence[int], block_size: int, *, salt: str, adapter: str = "", weights: str = ""
) -> list[BlockName]:
    """Returns the names of all full blocks of `tokens`, in order."""
    return list(names_after(root_name(salt, adapter, weights=weights), tokens, block_size=block_size))


def trunk_names(
    tokens: Sequence[int], block_size: int, *, salt: str, adapter: str = "", weights: str = ""
) -> list[BlockName]:
    """Returns the names of all blocks of a prompt. If the last one is not full, no full block has its name."""
    root = root_name(salt, adapter, weights=weights)
    names = list(names_after(root, tokens, block_size=block_size))
    if rest := tokens[len(names) * block_size :]:
        names += names_after(names[-1] if names else root, rest, block_size=len(rest))
    return names


def root_name(salt: str, adapter: str = "", *, weights: str = "") -> BlockName:
    """Returns the name before the first block. It depends on the adapter: an adapter's KV differs from its base's."""
    content = f"{adapter}\0{weights}" if weights else adapter
    key = blake2b(content.encode(), digest_size=32).digest() if content else b""
    return blake2b(salt.encode(), digest_size=16, key=key).digest()


def names_after(name: BlockName, tokens: Sequence[int], *, block_size: int) -> Iterator[BlockName]:
    """Yields the names of the full blocks of `tokens` that come after the block of `name`."""
    data, size = array("I", tokens).tobytes(), TOKEN_BYTES * block_size
    for begin in range(0, len(data) - size + 1, size):
        name = blake2b(name + data[begin : begin + size], digest_size=16).digest()
        yield name


class LastPrompt:
    """Caches the block names of the last prompt, since several decisions about one prompt follow each other."""

    def __init__(self) -> None:
        self._prompt: Sequence[int] = ()
        self._names: dict[tuple[int, str, str, str], list[BlockName]] = {}
        """Block names by block size, salt, adapter and weights."""

    def names(
        self, prompt: tuple[int, ...], block_size: int, *, salt: str, adapter: str = "", weights: str = ""
    ) -> Sequence[BlockName]:
        """Returns the result of `trunk_names`."""
        if prompt != self._prompt:
            self._prompt = prompt
            self._names.clear()
        kind = block_size, salt, adapter, weights
        if kind not in self._names:
            self._names[kind] = trunk_names(prompt, block_size, salt=salt, adapter=adapter, weights=weights)
        return self._names[kind]
