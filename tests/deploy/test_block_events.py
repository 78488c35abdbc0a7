"""Events about cached prompt blocks: the ports that publish them, and a gateway that follows a worker's events."""

import logging

import msgspec
import pytest

from bench.servers.ports import free_port
from motet.block_names import block_names
from motet.deploy.block_events import BlockEvents, WorkerEventFollower
from motet.engine_info import EngineKind
from motet.engines.wire import EngineReport
from motet.errors import ConfigError
from motet.kv_events.changes import Cleared, Stored
from motet.kv_events.event_schema import EventReader, events_in, replay_endpoint
from motet.kv_events.follower import BlockSource, Subscription
from motet.routing.workers.prefix_index import PrefixIndex
from motet.settings.server_config import KVEventsConfig
from tests.deploy.keeper_scene import FakeFollower, report
from tests.kv_events.names import apply_to
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

FIRST, SECOND = (Stored(tuple(block_names(range(i, i + 8), 4, salt="")), None, tuple(range(i, i + 8))) for i in (0, 50))


async def known_at(endpoint: str) -> set[bytes]:
    """Returns the blocks that a new subscriber receives."""
    subscription, reader = Subscription(BlockSource.of_motet(endpoint)), EventReader()
    names: set[bytes] = set()
    for message in (await subscription.replay(0, patience_s=PATIENCE_S, gap_s=PATIENCE_S)).messages:
        for event in events_in(message.payload):
            assert event is not None
            apply_to(names, reader.changes(event))
    subscription.close()
    return names


async def test_a_restarted_engine_publishes_at_the_same_port() -> None:
    events = BlockEvents(KVEventsConfig(kv_events_port=0))
    before = events.listener(4)
    endpoint = events.endpoint
    assert before is not None and endpoint is not None
    before([FIRST])
    assert await known_at(endpoint) == set(FIRST.names)
    before([Cleared()])
    after = events.listener(4)
    assert after is not None and events.endpoint == endpoint
    after([SECOND])
    assert await known_at(endpoint) == set(SECOND.names)
    await events.close()
    await events.close()


async def test_every_engine_has_two_ports_of_its_own() -> None:
    base = free_port()
    config = KVEventsConfig(kv_events_port=base)
    first, second = (BlockEvents(config, number) for number in range(2))
    try:
        for events, port in ((second, base + 2), (first, base)):
            assert events.listener(4) is not None
            assert events.endpoint == f"tcp://127.0.0.1:{port}"
        assert replay_endpoint(f"tcp://127.0.0.1:{base}") == f"tcp://127.0.0.1:{base + 1}"
        with pytest.raises(ConfigError, match="cannot listen on"):
            BlockEvents(config).listener(4)
    finally:
        await first.close()
        await second.close()


async def test_nothing_is_published_by_default() -> None:
    events = BlockEvents(KVEventsConfig())
    assert events.listener(4) is None and events.endpoint is None
    await events.close()


ID, HERE, THERE = "worker", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559"


async def test_blocks_of_a_worker_are_in_the_index_while_it_is_followed() -> None:
    index, follows = PrefixIndex(), FakeFollower()
    follower = WorkerEventFollower(ID, index, follow=follows)
    await follower.follow(report("first", block_events=HERE))
    await follows.started.acquire()
    assert index.blocks(ID) == 1
    await follower.follow(report("first"))
    assert (index.blocks(ID), follows.open) == (0, 0)


async def test_a_worker_is_followed_once_and_again_after_its_restart() -> None:
    follows = FakeFollower()
    follower = WorkerEventFollower(ID, PrefixIndex(), follow=follows)
    for engine_id, endpoint in (("first", HERE), ("first", HERE), ("second", HERE), ("second", THERE)):
        await follower.follow(report(engine_id, block_events=endpoint))
        if follows.open == 0:
            await follows.started.acquire()
    assert follows.sources == [HERE, HERE, THERE]
    await follower.stop()
    assert follows.open == 0


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("no socket")])
async def test_an_error_while_following_is_only_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    follows = FakeFollower(error)
    follower = WorkerEventFollower(ID, PrefixIndex(), follow=follows)
    with caplog.at_level(logging.ERROR):
        await follower.follow(report("first", block_events=HERE))
        await follows.started.acquire()
        await follower.stop()
    assert "block events of worker are not followed any more" in caplog.text


async def test_an_invalid_endpoint_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    follower = WorkerEventFollower(ID, PrefixIndex(), follow=FakeFollower())
    with caplog.at_level(logging.WARNING):
        await follower.follow(report("first", block_events="nowhere"))
        await follower.stop()
    assert "'nowhere' is not an endpoint" in caplog.text


@pytest.mark.parametrize("replay", [None, THERE])
async def test_a_third_party_worker_reports_its_port_for_replays_if_it_has_one(replay: str | None) -> None:
    follows = FakeFollower()
    follower = WorkerEventFollower(ID, PrefixIndex(), follow=follows)
    await follower.follow(vllm_report(HERE, replay))
    await follows.started.acquire()
    assert (follows.sources, follows.replays) == ([HERE], [replay])
    await follower.stop()


async def test_a_motet_server_replays_at_the_next_port() -> None:
    follows = FakeFollower()
    follower = WorkerEventFollower(ID, PrefixIndex(), follow=follows)
    await follower.follow(report(block_events=HERE))
    await follows.started.acquire()
    assert follows.replays == ["tcp://127.0.0.1:5558"]
    await follower.stop()


def vllm_report(endpoint: str, replay: str | None) -> EngineReport:
    motet = report(block_events=endpoint)
    info = msgspec.structs.replace(motet.info, kind=EngineKind.VLLM)
    return msgspec.structs.replace(motet, info=info, block_replay=replay)
