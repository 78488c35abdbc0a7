"""The form of changes on the wire: vLLM's KV events, as vLLM 0.32 encodes them.

    endpoint       tcp://HOST:PORT for subscribers; the next port is for replays
    one message    [topic][number: 8 bytes, big-endian][payload]
    payload        msgpack [time, [event, ...], data_parallel_rank]
    event          {"type": "BlockStored" | "BlockRemoved" | "AllBlocksCleared", ...}

SGLang and older versions of vLLM encode an event as an array that starts with its type. Motet reads both forms and
sends maps. A block's hash is a number of 64 bits, or bytes; Motet's hashes are the last 8 bytes of its block names.
`motet_names` is Motet's own field; other readers ignore it.

`event` encodes a change, and `EventReader` turns the events of any engine into changes with Motet's names. Motet
servers send these names. Other servers send their hashes and the tokens, from which the names are computed; the reader
keeps the name for each hash until the block is removed. Names of an adapter's blocks contain the adapter's name, as in
routing. Blocks that cannot be named are ignored, so that no group is routed to them: blocks after an unknown block,
blocks of images, and blocks of adapters without a name."""

from collections.abc import Collection, Iterator
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from motet.block_names import BlockName, names_after, root_name
from motet.errors import ConfigError
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored

WireHash = int | Annotated[bytes, msgspec.Meta(max_length=64)]
WireName = Annotated[BlockName, msgspec.Meta(max_length=64)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

DEVICE = "GPU"
"""vLLM's name for the memory that an engine computes in, also on a CPU."""
NUMBER_BYTES = 8
MAX_BLOCKS = 2**20
"""Maximum number of known blocks of one worker: 16 million tokens in blocks of 16."""
MAX_MEDIA = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""Number of the last message of a replay."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that do not match the type."""


class StoredFields(msgspec.Struct, frozen=True):
    """Stored blocks, in the form of any engine. UNSET fields are not encoded; vLLM's reader needs the others."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[TokenId]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    lora_id: int | None = None
    medium: Annotated[str, msgspec.Meta(max_length=100)] | None = None
    lora_name: str | None = None
    extra_keys: list[list[msgspec.Raw] | None] | msgspec.UnsetType | None = msgspec.UNSET
    """Inputs of each block in addition to tokens and adapter, such as images, or a salt in the first block."""
    group_idx: int | msgspec.UnsetType | None = msgspec.UNSET
    """Group of layers that store their KV in the same way; 0 if all layers do."""


class RemovedFields(msgspec.Struct, frozen=True):
    """Removed blocks, in the form of any engine."""

    block_hashes: list[WireHash]
    medium: Annotated[str, msgspec.Meta(max_length=100)] | None = None
    group_idx: int | msgspec.UnsetType | None = msgspec.UNSET


class BlockStored(StoredFields, frozen=True, tag=True):
    """Stored blocks as a map. Motet servers include Motet's names of the blocks, even without hashes and tokens."""

    motet_names: list[WireName] | msgspec.UnsetType = msgspec.UNSET


class BlockRemoved(RemovedFields, frozen=True, tag=True):
    motet_names: list[WireName] | msgspec.UnsetType = msgspec.UNSET


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True): ...


class _StoredArray(StoredFields, frozen=True, tag="BlockStored", array_like=True): ...


class _RemovedArray(RemovedFields, frozen=True, tag="BlockRemoved", array_like=True): ...


class _ClearedArray(msgspec.Struct, frozen=True, tag="AllBlocksCleared", array_like=True): ...


_MapEvent = BlockStored | BlockRemoved | AllBlocksCleared
_ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray
WireEvent = _MapEvent | _ArrayEvent


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    time: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = 0


_ENCODER = msgspec.msgpack.Encoder()
_BATCHES = msgspec.msgpack.Decoder(_Batch)
_MAPS: msgspec.msgpack.Decoder[_MapEvent] = msgspec.msgpack.Decoder(_MapEvent)
_ARRAYS: msgspec.msgpack.Decoder[_ArrayEvent] = msgspec.msgpack.Decoder(_ArrayEvent)


def payload(events: list[msgspec.Raw], time_s: float) -> bytes:
    return _ENCODER.encode(_Batch(time_s, events))


def events_in(payload: bytes) -> Iterator[WireEvent | None]:
    """Yields the events of a payload, None for an invalid event. Raises an error of `UNREADABLE`."""
    for raw in _BATCHES.decode(payload).events:
        try:
            yield (_ARRAYS if _is_array(raw) else _MAPS).decode(raw)
        except UNREADABLE:
            yield None


def number_bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def number_in(frame: bytes) -> int:
    return int.from_bytes(frame, "big")


def wire_hash(name: BlockName) -> int:
    return int.from_bytes(name[-NUMBER_BYTES:], "big")


def event(change: BlockChange, block_size: int, *, salted: Collection[BlockName] = ()) -> msgspec.Raw:
    """Encodes a change. `salted`: names of blocks of salted prompts among the removed blocks."""
    encoded: _MapEvent
    match change:
        case Stored(names, _, _, salted=True):
            # A salted prompt must stay separate: neither its tokens nor their hashes without the salt are published. An
            # adapter is identified by its digest, which only Motet's names contain.
            encoded = BlockStored([], None, [], block_size, medium=DEVICE, motet_names=list(names))
        case Stored(names, parent, token_ids):
            encoded = BlockStored(
                [wire_hash(name) for name in names],
                None if parent is None else wire_hash(parent),
                list(token_ids),
                block_size,
                medium=DEVICE,
                motet_names=list(names),
            )
        case Removed(names):
            hashes: list[WireHash] = [wire_hash(name) for name in names if name not in salted]
            encoded = BlockRemoved(hashes, DEVICE, motet_names=list(names))
        case Cleared():
            encoded = AllBlocksCleared()
    return msgspec.Raw(_ENCODER.encode(encoded))


def _is_array(raw: msgspec.Raw) -> bool:
    """Checks msgpack's first byte: fixarray, array 16 or array 32."""
    first = bytes(raw)[:1]
    return b"\x90" <= first <= b"\x9f" or first in (b"\xdc", b"\xdd")


def tcp(host: str, port: int | str) -> str:
    """Returns an endpoint. The port `*` means any free port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def port_of(endpoint: str) -> int:
    """Returns the port of an endpoint. Raises ConfigError unless it is `tcp://HOST:PORT`."""
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.scheme != "tcp" or not parts.hostname:
        raise ConfigError(f"block events: {endpoint!r} is not an endpoint such as tcp://host:5557")
    return port


def replay_endpoint(endpoint: str) -> str:
    """Returns the endpoint for replays of a Motet publisher at `endpoint`."""
    port = port_of(endpoint)
    return f"{endpoint.rpartition(':')[0]}:{port + 1}"


class EventReader:
    """Reads the events of one engine, in order."""

    def __init__(self) -> None:
        self._name_of: dict[WireHash, BlockName] = {}
        self._media: dict[WireHash, set[str | None]] = {}
        """Kinds of memory that store each block. An engine can move a block to memory from which it is fetched."""

    def changes(self, event: WireEvent) -> list[BlockChange]:
        match event:
            case BlockStored(motet_names=list(names)):
                return [Stored(tuple(names), None, ())] if names else []
            case BlockRemoved(motet_names=list(names)):
                return [Removed(tuple(names))]
            case StoredFields():
                return self._stored(event)
            case RemovedFields():
                return self._removed(event)
            case _:
                self.forget()
                return [Cleared()]

    def forget(self) -> None:
        self._name_of.clear()
        self._media.clear()

    def __len__(self) -> int:
        """Returns the number of hashes whose names are kept."""
        return len(self._name_of)

    def _stored(self, event: StoredFields) -> list[BlockChange]:
        complete = len(event.token_ids) == len(event.block_hashes) * event.block_size
        known = complete and not _of_other_layers(event) and (event.lora_id is None or event.lora_name)
        named = list(self._named(event)) if known else []
        if len(self._name_of) + len(named) > MAX_BLOCKS:
            self.forget()
            return [Cleared()]
        for block, name in named:
            self._name_of[block] = name
            media = self._media.setdefault(block, set())
            if len(media) < MAX_MEDIA:
                media.add(event.medium)
        return [Stored(tuple(name for _, name in named), None, ())] if named else []

    def _removed(self, event: RemovedFields) -> list[BlockChange]:
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

    def _named(self, event: StoredFields) -> Iterator[tuple[WireHash, BlockName]]:
        """Yields the blocks with their names, up to the first block without a name."""
        adapter = event.lora_name or ""
        extra = [_extra_keys(adapter, keys) for keys in event.extra_keys or [None] * len(event.block_hashes)]
        if event.parent_block_hash is None:
            salt = _salt(extra[:1])
            if salt is None:
                return
            before, extra = root_name(salt, adapter), [None, *extra[1:]]
        elif (known := self._name_of.get(event.parent_block_hash)) is not None:
            before = known
        else:
            return
        names = names_after(before, event.token_ids, block_size=event.block_size)
        for block, keys, name in zip(event.block_hashes, extra, names, strict=False):
            if keys:
                return
            yield block, name


def _of_other_layers(event: StoredFields | RemovedFields) -> bool:
    return event.group_idx not in (msgspec.UNSET, None, 0)


def _extra_keys(adapter: str, keys: list[msgspec.Raw] | None) -> list[msgspec.Raw] | None:
    """Returns the keys of a block without the adapter's name, which vLLM puts first."""
    if adapter and keys and bytes(keys[0]) == msgspec.msgpack.encode(adapter):
        return keys[1:]
    return keys


def _salt(first: list[list[msgspec.Raw] | None]) -> str | None:
    """Returns the salt of a prompt, from the keys of its first block; None if they are something else than a salt."""
    keys = first[0] if first else None
    if not keys:
        return ""
    try:
        return msgspec.msgpack.decode(keys[0], type=str) if len(keys) == 1 else None
    except UNREADABLE:
        return None
