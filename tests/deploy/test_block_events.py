"""Which ports tell of which engine, and what becomes of them when an engine is started again."""

from dataclasses import dataclass, field

import pytest

from bench.ports import free_port
from motet.block_names import block_names
from motet.config import KVEventsConfig
from motet.deploy.block_events import BlockEvents
from motet.errors import ConfigError
from motet.ids import ModelName
from motet.kv_events.changes import BlockListener, Cleared, Stored, apply_to
from motet.kv_events.endpoint import replay_endpoint
from motet.kv_events.reader import EventReader
from motet.kv_events.schema import events_in
from motet.kv_events.subscription import BlockSource, Subscription
from motet.types import EngineInfo, Role

pytestmark = pytest.mark.anyio

INFO = EngineInfo(
    model=ModelName("fake"),
    max_model_len=100,
    vocab_size=100,
    block_size=4,
    num_blocks=10,
    bytes_per_block=1,
    max_num_seqs=10,
    role=Role.BOTH,
    eos_token_ids=(),
    dtype="float32",
    device="cpu",
    fingerprint="",
)
FIRST, SECOND = (Stored(tuple(block_names(range(i, i + 8), 4, "")), None, tuple(range(i, i + 8))) for i in (0, 50))


@dataclass
class Telling:
    """An engine of which nothing is known but its blocks."""

    info: EngineInfo = INFO
    listeners: list[BlockListener] = field(default_factory=list)

    def listen_to_blocks(self, listener: BlockListener) -> None:
        self.listeners.append(listener)

    def tell(self, *changes: Stored | Cleared) -> None:
        for listener in self.listeners:
            listener(changes)


async def known_at(endpoint: str) -> set[bytes]:
    """What someone who comes now is told."""
    subscription, reader = Subscription(BlockSource.ours(endpoint)), EventReader()
    names: set[bytes] = set()
    for message in (await subscription.replay(0, patience_s=5.0)).messages:
        for event in events_in(message.payload):
            assert event is not None
            apply_to(names, reader.changes(event))
    subscription.close()
    return names


async def test_an_engine_that_is_started_again_is_told_of_at_the_same_place() -> None:
    events = BlockEvents(KVEventsConfig(kv_events_port=0), ["decode-0"])
    before, after = Telling(), Telling()
    endpoint = events.publish("decode-0", before)
    assert endpoint is not None and endpoint == events.endpoint("decode-0")
    before.tell(FIRST)
    assert await known_at(endpoint) == set(FIRST.names)
    before.tell(Cleared())
    assert events.publish("decode-0", after) == endpoint
    after.tell(SECOND)
    assert await known_at(endpoint) == set(SECOND.names)
    await events.close()
    await events.close()


async def test_every_engine_has_two_ports_of_its_own() -> None:
    base = free_port()
    events = BlockEvents(KVEventsConfig(kv_events_port=base), ["prefill-0", "decode-0"])
    try:
        assert events.publish("decode-0", Telling()) == f"tcp://127.0.0.1:{base + 2}"
        assert events.publish("prefill-0", Telling()) == f"tcp://127.0.0.1:{base}"
        assert replay_endpoint(f"tcp://127.0.0.1:{base}") == f"tcp://127.0.0.1:{base + 1}"
        taken = BlockEvents(KVEventsConfig(kv_events_port=base), ["a"])
        with pytest.raises(ConfigError, match="cannot be listened on"):
            taken.publish("a", Telling())
    finally:
        await events.close()


async def test_nobody_is_told_unless_asked_for() -> None:
    engine, events = Telling(), BlockEvents(KVEventsConfig(), ["a"])
    assert events.publish("a", engine) is None and events.endpoint("a") is None
    assert engine.listeners == []
    await events.close()
