"""Workers that publish blocks without end, or messages that are not events."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from motet.block_names import block_names
from motet.deploy import block_events
from motet.deploy.block_events import indexing
from motet.kv_events import event_schema as schema
from motet.kv_events import follower
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored
from motet.kv_events.event_schema import EventReader, StoredFields
from motet.kv_events.follower import Follower, NumberedMessage, Replayed
from motet.routing.workers.prefix_index import PrefixIndex
from tests.attack.mutants import mutants
from tests.kv_events.test_follower import Script, message, stored

pytestmark = pytest.mark.anyio
NAMES = block_names(range(400), 4, salt="")


async def followed(script: Script) -> list[BlockChange]:
    """Returns the changes that a follower reports until the end of the script."""
    changes: list[BlockChange] = []
    following = asyncio.create_task(Follower(script, changes.extend, name="w").run())
    ended = asyncio.create_task(script.ended.wait())
    await asyncio.wait((following, ended), return_when=asyncio.FIRST_COMPLETED)
    assert not following.done()
    following.cancel()
    await asyncio.wait((following,))
    return changes


async def test_no_event_affects_events_after_it() -> None:
    def payloads() -> Iterator[bytes]:
        valid: tuple[BlockChange, ...] = (
            Stored(tuple(NAMES[:2]), None, tuple(range(8))),
            Removed((NAMES[0],)),
            Cleared(),
        )
        for seed, change in enumerate(valid):
            content = msgspec.msgpack.decode(schema.payload([schema.event(change, 4)], 0.0))
            yield from mutants(content, seed=seed, count=100)
            content[1][0].pop("motet_names", None)  # the form of other engines
            yield from mutants(content, seed=seed + 10, count=100)

    received = [NumberedMessage(number, payload) for number, payload in enumerate(payloads())]
    last = stored(len(received), NAMES[7])
    assert (await followed(Script([*received, last])))[-1] == Stored((NAMES[7],), None, ())


async def test_a_replay_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MAX_REPLAY_BYTES", 10_000)
    script = Script(
        [stored(0, NAMES[0]), stored(10**6, NAMES[1])],
        [message(number, Stored((NAMES[2],), None, ())) for number in range(1000)],
        lambda _, messages: Replayed(messages[:10], complete=False),
    )
    await followed(script)
    assert len(script.replays) < 50


def test_the_number_of_blocks_of_one_worker_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (schema, block_events):
        monkeypatch.setattr(module, "MAX_BLOCKS", 50)
    index = PrefixIndex()
    take, reader = indexing(index, "w"), EventReader()
    for number in range(0, 400, 4):
        take([Stored((NAMES[number // 4],), None, ())])
        fields = StoredFields(
            block_hashes=[number], parent_block_hash=None, token_ids=[number] * 4, block_size=4, medium=str(number)
        )
        take(reader.changes(schema.BlockStored(**msgspec.structs.asdict(fields))))
        assert index.blocks("w") <= 50 and len(reader) <= 50
    index.check()
