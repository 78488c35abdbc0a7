"""The schema reads bytes that vLLM encodes, and encodes bytes that vLLM reads."""

import msgspec
import pytest

from motet.block_names import block_names
from motet.kv_events import event_schema as schema
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored
from motet.kv_events.event_schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventReader,
    RemovedFields,
    StoredFields,
)

NAMES = tuple(block_names(range(8), 4, salt=""))
FIRST, SECOND = (int.from_bytes(name[-8:], "big") for name in NAMES)

VLLM = bytes.fromhex(
    "93cb3ff8000000000000948aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cffffffffffffffffd07b170617265"
    "6e745f626c6f636b5f68617368c0a9746f6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d6564"
    "69756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a6706570706572c0a967726f75705f6964780088a474797065ab42"
    "6c6f636b53746f726564ac626c6f636b5f686173686573"
    "91c4200101010101010101010101010101010101010101010101010101010101010101b1706172656e745f626c6f636b5f68617368"
    "c4200202020202020202020202020202020202020202020202020202020202020202a9746f6b656e5f696473920102aa626c6f636b5f73697a65"
    "02a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f"
    "6861736865739107a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
"""A KVEventBatch that vLLM 0.32.0 encoded: a salted prompt, hashes as bytes, a removal, a clearing."""


def test_events_of_vllm_are_read() -> None:
    salted, hashed, removed, cleared = schema.events_in(VLLM)
    assert isinstance(salted, BlockStored) and isinstance(hashed, BlockStored)
    assert (salted.block_hashes, salted.parent_block_hash, salted.block_size) == ([2**64 - 3, 7], None, 2)
    assert (salted.token_ids, salted.group_idx, salted.medium) == ([1, 2, 3, 70000], 0, "GPU")
    assert salted.extra_keys and salted.extra_keys[0] and salted.extra_keys[1] is None
    assert msgspec.msgpack.decode(salted.extra_keys[0][0]) == "pepper"
    assert (hashed.block_hashes, hashed.parent_block_hash) == ([b"\x01" * 32], b"\x02" * 32)
    assert hashed.motet_names is msgspec.UNSET
    assert removed == BlockRemoved([7], "GPU", 0)
    assert cleared == AllBlocksCleared()


def test_motets_events_have_every_field_that_vllms_reader_needs() -> None:
    """vLLM 0.32.0's own decoder has read these: every field without a default is present."""
    changes: list[BlockChange] = [
        Stored(NAMES, None, tuple(range(8))),
        Stored(NAMES[1:], NAMES[0], (4, 5, 6, 7)),
        Removed(NAMES[1:]),
        Cleared(),
    ]
    assert msgspec.msgpack.decode(schema.payload([schema.event(change, 4) for change in changes], 1.5)) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [FIRST, SECOND],
                "parent_block_hash": None,
                "token_ids": [0, 1, 2, 3, 4, 5, 6, 7],
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "motet_names": list(NAMES),
            },
            {
                "type": "BlockStored",
                "block_hashes": [SECOND],
                "parent_block_hash": FIRST,
                "token_ids": [4, 5, 6, 7],
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "motet_names": [NAMES[1]],
            },
            {"type": "BlockRemoved", "block_hashes": [SECOND], "medium": "GPU", "motet_names": [NAMES[1]]},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_only_the_names_of_a_salted_prompt_are_published() -> None:
    names = tuple(block_names(range(8), 4, salt="pepper"))
    stored, removed = Stored(names, None, tuple(range(8)), salted=True), Removed((names[1], NAMES[1]))
    payload = schema.payload([schema.event(stored, 4), schema.event(removed, 4, salted=names)], 0.0)
    assert b"pepper" not in payload
    assert list(schema.events_in(payload)) == [
        BlockStored([], None, [], 4, medium="GPU", motet_names=list(names)),
        BlockRemoved([SECOND], "GPU", motet_names=[names[1], NAMES[1]]),
    ]


def test_events_as_arrays_are_read_too() -> None:
    """Old vLLM versions and SGLang send arrays, which can lack trailing fields or have more."""
    batch = [
        1.5,
        [
            ["BlockStored", [1], None, [5, 6], 2, None],
            ["BlockStored", [-7], 1, [5, 6], 2, None, "GPU", None, None, 0, "full_attention", None],
            ["BlockRemoved", [1]],
            ["AllBlocksCleared"],
        ],
    ]
    short, long, removed, cleared = schema.events_in(msgspec.msgpack.encode(batch))
    assert isinstance(short, StoredFields) and isinstance(long, StoredFields)
    assert (short.block_hashes, short.token_ids, short.medium) == ([1], [5, 6], None)
    assert (long.block_hashes, long.parent_block_hash, long.medium, long.group_idx) == ([-7], 1, "GPU", 0)
    assert isinstance(removed, RemovedFields) and removed.block_hashes == [1]
    assert EventReader().changes(cleared or short) == [Cleared()]


STORED = ["BlockStored", [1], None]


@pytest.mark.parametrize(
    "unknown",
    [{"type": "BlockMoved", "block_hashes": [1]}, ["BlockStored", "x"], 7, {}, [*STORED, [], 0], [*STORED, [-1], 1]],
)
def test_an_unknown_event_does_not_affect_the_others(unknown: object) -> None:
    """Regression: the last two, which no engine sends, ended a follower."""
    events = list(schema.events_in(msgspec.msgpack.encode([1.0, [unknown, {"type": "AllBlocksCleared"}], 0])))
    assert events == [None, AllBlocksCleared()]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"nonsense", msgspec.msgpack.encode({"ts": 1.0})])
def test_an_invalid_payload_is_an_error(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        list(schema.events_in(payload))
