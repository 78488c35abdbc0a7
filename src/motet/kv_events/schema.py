"""How changes look on the wire: vLLM's KV events, as vLLM 0.32 encodes them.

    one message    [topic][number: 8 bytes, big-endian][payload]
    payload        msgpack [time, [event, ...], data_parallel_rank]
    event          {"type": "BlockStored" | "BlockRemoved" | "AllBlocksCleared", ...}

Older engines, and SGLang, write an event as an array that begins with its type; both are read, a map is written. A
block's hash is a number of 64 bits there, or bytes; ours are the last 8 bytes of our names. `motet_names` is not
vLLM's; readers that do not know it pass over it.
"""

from collections.abc import Collection, Iterator

import msgspec

from motet.block_names import BlockName
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored

WireHash = int | bytes

DEVICE = "GPU"
"""What vLLM calls the memory that an engine computes in, on a CPU too."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""In place of a number: the end of a replay."""


class _Stored(msgspec.Struct, frozen=True):
    """UNSET fields are not written; vLLM's reader insists on the others."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[msgspec.Raw] | None] | msgspec.UnsetType | None = msgspec.UNSET
    """A block: what its content depends on beside tokens and adapter, such as images, or a salt in the first block."""
    group_idx: int | msgspec.UnsetType | None = msgspec.UNSET
    """Of the layers that keep their KV in one way; 0 for models in which all do."""


class _Removed(msgspec.Struct, frozen=True):
    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | msgspec.UnsetType | None = msgspec.UNSET


class BlockStored(_Stored, frozen=True, tag=True):
    motet_names: list[BlockName] | msgspec.UnsetType = msgspec.UNSET
    """Our names; also of blocks whose hashes and tokens are not told."""


class BlockRemoved(_Removed, frozen=True, tag=True):
    motet_names: list[BlockName] | msgspec.UnsetType = msgspec.UNSET


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


class _StoredArray(_Stored, frozen=True, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_Removed, frozen=True, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(msgspec.Struct, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    time: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = 0


_ENCODER = msgspec.msgpack.Encoder()
_BATCHES = msgspec.msgpack.Decoder(_Batch)
_MAPS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_ARRAYS: msgspec.msgpack.Decoder[_StoredArray | _RemovedArray | _ClearedArray] = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
)


def event(change: BlockChange, block_size: int, *, salted: Collection[BlockName] = ()) -> msgspec.Raw:
    """`salted`: those among the names that are removed."""
    return msgspec.Raw(_ENCODER.encode(_event(change, block_size, salted)))


def payload(events: list[msgspec.Raw], time_s: float) -> bytes:
    return _ENCODER.encode(_Batch(time_s, events))


def events_in(payload: bytes) -> Iterator[Event | None]:
    """The events of a payload, None for one that is not understood. Raises DecodeError for what is no payload."""
    for raw in _BATCHES.decode(payload).events:
        try:
            yield _of_array(_ARRAYS.decode(raw)) if _is_array(raw) else _MAPS.decode(raw)
        except msgspec.DecodeError:
            yield None


def number_bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def number_in(frame: bytes) -> int:
    return int.from_bytes(frame, "big")


def wire_hash(name: BlockName) -> int:
    """A name, or the hash of another engine, as a number of 64 bits."""
    return int.from_bytes(name[-NUMBER_BYTES:], "big")


def _event(change: BlockChange, block_size: int, salted: Collection[BlockName]) -> Event:
    match change:
        case Stored(names, _, _, salted=True):
            # Whoever salts a prompt wants it apart: nobody is told its tokens, nor that they are here without the salt.
            return BlockStored([], None, [], block_size, medium=DEVICE, motet_names=list(names))
        case Stored(names, parent, token_ids):
            return BlockStored(
                [wire_hash(name) for name in names],
                None if parent is None else wire_hash(parent),
                list(token_ids),
                block_size,
                medium=DEVICE,
                motet_names=list(names),
            )
        case Removed(names):
            hashes: list[WireHash] = [wire_hash(name) for name in names if name not in salted]
            return BlockRemoved(hashes, DEVICE, motet_names=list(names))
        case Cleared():
            return AllBlocksCleared()


def _of_array(event: _StoredArray | _RemovedArray | _ClearedArray) -> Event:
    fields = msgspec.structs.asdict(event)
    match event:
        case _StoredArray():
            return BlockStored(**fields)
        case _RemovedArray():
            return BlockRemoved(**fields)
        case _ClearedArray():
            return AllBlocksCleared()


def _is_array(raw: msgspec.Raw) -> bool:
    """By msgpack's first byte: fixarray, array 16 or array 32."""
    first = bytes(raw)[:1]
    return b"\x90" <= first <= b"\x9f" or first in (b"\xdc", b"\xdd")
