"""Makes changes in our names of the events of any engine that speaks vLLM's schema.

Our own servers tell our names. Others tell hashes of theirs and the tokens, of which our names follow; so this keeps
what each of their hashes is called here, until the block is removed.

Blocks of an adapter are named with its name, as whoever looks for them names them. What cannot be named is passed over:
blocks behind one that was never told of (a follower that came late), blocks of images, and of adapters without a name.
Nobody is sent to them, and that is all.
"""

from collections.abc import Iterator

import msgspec

from motet.block_names import BlockName, names_after, root_name
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored
from motet.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, WireHash


class EventReader:
    """Reads the events of one engine, in order."""

    def __init__(self) -> None:
        self._name_of: dict[WireHash, BlockName] = {}
        self._media: dict[WireHash, set[str | None]] = {}
        """Where a block is: it may have been moved to memory from which it can be fetched."""

    def changes(self, event: Event) -> list[BlockChange]:
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved():
                return self._removed(event)
            case AllBlocksCleared():
                self.forget()
                return [Cleared()]

    def forget(self) -> None:
        self._name_of.clear()
        self._media.clear()

    def __len__(self) -> int:
        """How many hashes it keeps names of."""
        return len(self._name_of)

    def _stored(self, event: BlockStored) -> list[BlockChange]:
        names = event.motet_names
        if names is not msgspec.UNSET:
            return [Stored(tuple(names), None, ())] if names else []
        named = list(self._named(event)) if _has_names(event) else []
        for block, name in named:
            self._name_of[block] = name
            self._media.setdefault(block, set()).add(event.medium)
        return [Stored(tuple(name for _, name in named), None, ())] if named else []

    def _removed(self, event: BlockRemoved) -> list[BlockChange]:
        if event.motet_names is not msgspec.UNSET:
            return [Removed(tuple(event.motet_names))]
        if _of_other_layers(event):
            return []
        gone = []
        for block in event.block_hashes:
            media = self._media.get(block, set())
            media.discard(event.medium)
            if not media and block in self._name_of:
                del self._media[block]
                gone.append(self._name_of.pop(block))
        return [Removed(tuple(gone))] if gone else []

    def _named(self, event: BlockStored) -> Iterator[tuple[WireHash, BlockName]]:
        """The blocks with their names, up to the first that has none."""
        adapter = event.lora_name or ""
        extra = [_beside(adapter, keys) for keys in event.extra_keys or [None] * len(event.block_hashes)]
        if event.parent_block_hash is None:
            salt = _salt(extra[:1])
            if salt is None:
                return
            before, extra = root_name(salt, adapter), [None, *extra[1:]]
        elif (known := self._name_of.get(event.parent_block_hash)) is not None:
            before = known
        else:
            return
        names = names_after(before, event.token_ids, event.block_size)
        for block, keys, name in zip(event.block_hashes, extra, names, strict=False):
            if keys:
                return
            yield block, name


def _has_names(event: BlockStored) -> bool:
    """Whether its blocks are all there, and it is known whose they are."""
    whole = len(event.token_ids) == len(event.block_hashes) * event.block_size
    return whole and not _of_other_layers(event) and (event.lora_id is None or bool(event.lora_name))


def _of_other_layers(event: BlockStored | BlockRemoved) -> bool:
    return event.group_idx not in (msgspec.UNSET, None, 0)


def _beside(adapter: str, keys: list[msgspec.Raw] | None) -> list[msgspec.Raw] | None:
    """The keys of a block without the adapter's name, which vLLM puts first."""
    if adapter and keys and bytes(keys[0]) == msgspec.msgpack.encode(adapter):
        return keys[1:]
    return keys


def _salt(first: list[list[msgspec.Raw] | None]) -> str | None:
    """The salt of a prompt, from the keys of its first block; None if they are no salt."""
    keys = first[0] if first else None
    if not keys:
        return ""
    try:
        return msgspec.msgpack.decode(keys[0], type=str) if len(keys) == 1 else None
    except msgspec.DecodeError:
        return None
