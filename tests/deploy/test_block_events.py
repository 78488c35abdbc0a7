"""Prompt blocks that engines have: the ports that publish them, and how a gateway follows those of a worker."""

import logging

import msgspec
import pytest

from bench.servers.ports import free_port
from motet.block_names import block_names
from motet.deploy.block_events import BlockEvents, WorkerEventFollower
from motet.engines.wire import EngineReport
from motet.errors import ConfigError
from motet.kv_events.changes import Cleared, Stored
from motet.kv_events.event_schema import EventReader, events_in, replay_endpoint
from motet.kv_events.follower import BlockSource, Subscription
from motet.routing.workers.prefix_index import PrefixIndex
from motet.settings.server_config import KVEventsConfig
from motet.types import EngineKind
from tests.deploy.kept import Follows, report
from tests.kv_events.names import apply_to
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

FIRST, SECOND = (Stored(tuple(block_names(range(i, i + 8), 4, salt="")), None, tuple(range(i, i + 8))) for i in (0, 50))


async def known_at(endpoint: str) -> set[bytes]:
    """Returns the blocks that a new listener hears of."""
    subscription, reader = Subscription(BlockSource.of_motet(endpoint)), EventReader()
    names: set[bytes] = set()
    for message in (await subscription.replay(0, patience_s=PATIENCE_S, gap_s=PATIENCE_S)).messages:
        for event in events_in(message.payload):
            assert event is not None
            apply_to(names, reader.changes(event))
    subscription.close()
    return names


async def test_an_engine_that_is_started_again_publishes_at_the_same_port() -> None:
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


async def test_nothing_is_published_unless_asked_for() -> None:
    events = BlockEvents(KVEventsConfig())
    assert events.listener(4) is None and events.endpoint is None
    await events.close()


ID, HERE, THERE = "worker", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559"


async def test_blocks_of_a_worker_are_in_the_index_while_it_is_followed() -> None:
    index, follows = PrefixIndex(), Follows()
    following = WorkerEventFollower(ID, index, follow=follows)
    await following.follow(report("first", block_events=HERE))
    await follows.begun.acquire()
    assert index.blocks(ID) == 1
    await following.follow(report("first"))
    assert (index.blocks(ID), follows.open) == (0, 0)


async def test_a_worker_is_followed_once_and_again_after_its_restart() -> None:
    follows = Follows()
    following = WorkerEventFollower(ID, PrefixIndex(), follow=follows)
    for engine_id, endpoint in (("first", HERE), ("first", HERE), ("second", HERE), ("second", THERE)):
        await following.follow(report(engine_id, block_events=endpoint))
        if follows.open == 0:
            await follows.begun.acquire()
    assert follows.sources == [HERE, HERE, THERE]
    await following.stop()
    assert follows.open == 0


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("no socket")])
async def test_an_error_while_following_is_only_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    follows = Follows(error)
    following = WorkerEventFollower(ID, PrefixIndex(), follow=follows)
    with caplog.at_level(logging.ERROR):
        await following.follow(report("first", block_events=HERE))
        await follows.begun.acquire()
        await following.stop()
    assert "block events of worker are not followed any more" in caplog.text


async def test_an_invalid_endpoint_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    following = WorkerEventFollower(ID, PrefixIndex(), follow=Follows())
    with caplog.at_level(logging.WARNING):
        await following.follow(report("first", block_events="nowhere"))
        await following.stop()
    assert "'nowhere' is not an endpoint" in caplog.text


@pytest.mark.parametrize("replay", [None, THERE])
async def test_a_foreign_worker_names_the_port_where_it_replays_if_it_does(replay: str | None) -> None:
    follows = Follows()
    following = WorkerEventFollower(ID, PrefixIndex(), follow=follows)
    await following.follow(theirs(HERE, replay))
    await follows.begun.acquire()
    assert (follows.sources, follows.replays) == ([HERE], [replay])
    await following.stop()


async def test_a_server_of_ours_replays_at_the_port_after() -> None:
    follows = Follows()
    following = WorkerEventFollower(ID, PrefixIndex(), follow=follows)
    await following.follow(report(block_events=HERE))
    await follows.begun.acquire()
    assert follows.replays == ["tcp://127.0.0.1:5558"]
    await following.stop()


def theirs(endpoint: str, replay: str | None) -> EngineReport:
    of_ours = report(block_events=endpoint)
    info = msgspec.structs.replace(of_ours.info, kind=EngineKind.VLLM)
    return msgspec.structs.replace(of_ours, info=info, block_replay=replay)
