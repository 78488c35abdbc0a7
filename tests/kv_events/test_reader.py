"""The reader gives blocks Motet's names, from the events of engines with names of their own."""

import msgspec
import pytest

from motet.block_names import block_names
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored
from motet.kv_events.event_schema import AllBlocksCleared, BlockRemoved, BlockStored, EventReader, WireHash
from tests.kv_events.names import apply_to

SIZE = 4
PROMPT = tuple(range(100, 116))
NAMES = block_names(PROMPT, SIZE, salt="")
SALTED = block_names(PROMPT, SIZE, salt="pepper")
HASHES: dict[str, list[WireHash]] = {"numbers": [11, 2**64 - 1, 33, 44], "bytes": [bytes([i]) * 32 for i in range(4)]}
SALT = [[msgspec.Raw(msgspec.msgpack.encode("pepper"))]]


def stored(hashes: list[WireHash], start: int, end: int, **changes: object) -> BlockStored:
    """Returns the blocks [start, end) of the prompt, as vLLM reports them."""
    fields: dict[str, object] = {
        "block_hashes": hashes[start:end],
        "parent_block_hash": hashes[start - 1] if start else None,
        "token_ids": list(PROMPT[start * SIZE : end * SIZE]),
        "block_size": SIZE,
        "medium": "GPU",
        "group_idx": 0,
        **changes,
    }
    return BlockStored(**fields)  # type: ignore[arg-type]


def names_of(changes: list[BlockChange]) -> set[bytes]:
    names: set[bytes] = set()
    apply_to(names, changes)
    return names


@pytest.mark.parametrize("hashes", HASHES.values(), ids=HASHES)
def test_blocks_of_another_engine_get_motets_names(hashes: list[WireHash]) -> None:
    reader = EventReader()
    changes = reader.changes(stored(hashes, 0, 2)) + reader.changes(stored(hashes, 2, 4))
    assert names_of(changes) == set(NAMES)
    assert reader.changes(BlockRemoved(hashes[3:], "GPU", 0)) == [Removed((NAMES[3],))]
    assert reader.changes(AllBlocksCleared()) == [Cleared()]


def test_a_removed_block_is_forgotten() -> None:
    reader, hashes = EventReader(), HASHES["numbers"]
    reader.changes(stored(hashes, 0, 4))
    reader.changes(BlockRemoved(hashes, "GPU"))
    assert len(reader) == 0
    assert reader.changes(BlockRemoved(hashes, "GPU")) == []
    assert reader.changes(stored(hashes, 2, 4)) == [], "their parent is unknown"


def test_a_block_that_is_reported_twice_is_removed_once() -> None:
    reader, hashes = EventReader(), HASHES["numbers"]
    assert reader.changes(stored(hashes, 0, 2)) == reader.changes(stored(hashes, 0, 2))
    assert reader.changes(BlockRemoved(hashes[:2], "GPU")) == [Removed(tuple(NAMES[:2]))]


def test_a_block_is_stored_as_long_as_any_memory_has_it() -> None:
    reader, hashes = EventReader(), HASHES["numbers"]
    reader.changes(stored(hashes, 0, 1))
    reader.changes(stored(hashes, 0, 1, medium="CPU"))
    assert reader.changes(BlockRemoved(hashes[:1], "CPU")) == []
    assert reader.changes(BlockRemoved(hashes[:1], "GPU")) == [Removed((NAMES[0],))]


def test_blocks_of_a_salted_prompt_have_names_with_the_salt() -> None:
    reader, hashes = EventReader(), HASHES["numbers"]
    changes = reader.changes(stored(hashes, 0, 2, extra_keys=[*SALT, None]))
    changes += reader.changes(stored(hashes, 2, 4, extra_keys=[None, None]))
    assert names_of(changes) == set(SALTED)


IMAGE = [msgspec.Raw(msgspec.msgpack.encode(["digest", 3]))]
FRENCH = msgspec.Raw(msgspec.msgpack.encode("french"))


@pytest.mark.parametrize(
    ("salt", "first", "later"),
    [
        ("", {"extra_keys": [[FRENCH], [FRENCH]]}, {"extra_keys": [[FRENCH], [FRENCH]]}),
        ("pepper", {"extra_keys": [[FRENCH, *SALT[0]], [FRENCH]]}, {"extra_keys": [[FRENCH], [FRENCH]]}),
        ("", {}, {}),
    ],
    ids=["vLLM", "with a salt, which comes after the adapter", "older engines: no keys"],
)
def test_blocks_of_an_adapter_have_names_with_the_adapter(
    salt: str, first: dict[str, object], later: dict[str, object]
) -> None:
    reader, hashes = EventReader(), HASHES["numbers"]
    changes = reader.changes(stored(hashes, 0, 2, lora_name="french", lora_id=1, **first))
    changes += reader.changes(stored(hashes, 2, 4, lora_name="french", lora_id=1, **later))
    french = block_names(PROMPT, SIZE, salt=salt, adapter="french")
    assert names_of(changes) == set(french)
    assert len(french) == 4
    assert set(french).isdisjoint({*NAMES, *SALTED, *block_names(PROMPT, SIZE, salt=salt, adapter="english")})


def test_an_adapter_with_an_image_is_not_read_as_a_salt() -> None:
    extra = [[FRENCH, *IMAGE], [FRENCH], [FRENCH], [FRENCH]]
    assert EventReader().changes(stored(HASHES["numbers"], 0, 4, lora_name="french", extra_keys=extra)) == []


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"lora_id": 1}, 0),
        ({"group_idx": 1}, 0),
        ({"extra_keys": [IMAGE, None, None, None]}, 0),
        ({"extra_keys": [[*SALT[0], *IMAGE], None, None, None]}, 0),
        ({"extra_keys": [None, None, IMAGE, None]}, 2),
        ({"block_size": 3}, 0),
        ({"parent_block_hash": 99}, 0),
    ],
    ids=[
        "lora without a name",
        "another group",
        "an image",
        "an image and a salt",
        "an image later",
        "block size",
        "unknown parent",
    ],
)
def test_blocks_that_depend_on_more_than_tokens_are_ignored(changes: dict[str, object], known: int) -> None:
    reader = EventReader()
    assert names_of(reader.changes(stored(HASHES["numbers"], 0, 4, **changes))) == set(NAMES[:known])
    assert len(reader) == known


def test_a_removal_in_other_layers_does_not_remove_the_block() -> None:
    reader, hashes = EventReader(), HASHES["numbers"]
    reader.changes(stored(hashes, 0, 1))
    assert reader.changes(BlockRemoved(hashes[:1], "GPU", 1)) == []


def test_motets_own_names_are_used_unchanged() -> None:
    reader = EventReader()
    assert reader.changes(BlockStored([], None, [], SIZE, motet_names=SALTED)) == [Stored(tuple(SALTED), None, ())]
    assert reader.changes(BlockRemoved([7], motet_names=SALTED[3:])) == [Removed((SALTED[3],))]
    assert len(reader) == 0
