"""Block events of a worker elsewhere: followed as long as it is the same, and never a trouble for it."""

import logging

import msgspec
import pytest

from motet.deploy.event_following import EventFollowing
from motet.engines.wire import EngineReport
from motet.routing.prefix_index import PrefixIndex
from motet.types import EngineKind
from tests.deploy.kept import Follows, report

pytestmark = pytest.mark.anyio

ID, HERE, THERE = "worker", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559"


async def test_what_a_worker_tells_goes_into_the_index_as_long_as_it_is_followed() -> None:
    index, follows = PrefixIndex(), Follows()
    following = EventFollowing(ID, index, follows)
    await following.follow(report("first", block_events=HERE))
    await follows.begun.acquire()
    assert index.blocks(ID) == 1
    await following.follow(report("first"))
    assert (index.blocks(ID), follows.open) == (0, 0)


async def test_the_same_worker_is_followed_once_and_another_start_anew() -> None:
    follows = Follows()
    following = EventFollowing(ID, PrefixIndex(), follows)
    for engine_id, endpoint in (("first", HERE), ("first", HERE), ("second", HERE), ("second", THERE)):
        await following.follow(report(engine_id, block_events=endpoint))
        if follows.open == 0:
            await follows.begun.acquire()
    assert follows.sources == [HERE, HERE, THERE]
    await following.stop()
    assert follows.open == 0


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("no socket")])
async def test_trouble_is_logged_and_no_more(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    follows = Follows(error)
    following = EventFollowing(ID, PrefixIndex(), follows)
    with caplog.at_level(logging.ERROR):
        await following.follow(report("first", block_events=HERE))
        await follows.begun.acquire()
        await following.stop()
    assert "block events of worker are not followed any more" in caplog.text


async def test_an_endpoint_that_is_none_is_logged_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    following = EventFollowing(ID, PrefixIndex(), Follows())
    with caplog.at_level(logging.WARNING):
        await following.follow(report("first", block_events="nowhere"))
        await following.stop()
    assert "'nowhere' is no endpoint" in caplog.text


@pytest.mark.parametrize("replay", [None, THERE])
async def test_a_worker_that_is_not_ours_says_where_it_replays_if_it_does(replay: str | None) -> None:
    follows = Follows()
    following = EventFollowing(ID, PrefixIndex(), follows)
    await following.follow(theirs(HERE, replay))
    await follows.begun.acquire()
    assert (follows.sources, follows.replays) == ([HERE], [replay])
    await following.stop()


async def test_a_server_of_ours_replays_at_the_port_after() -> None:
    follows = Follows()
    following = EventFollowing(ID, PrefixIndex(), follows)
    await following.follow(report(block_events=HERE))
    await follows.begun.acquire()
    assert follows.replays == ["tcp://127.0.0.1:5558"]
    await following.stop()


def theirs(endpoint: str, replay: str | None) -> EngineReport:
    of_ours = report(block_events=endpoint)
    info = msgspec.structs.replace(of_ours.info, kind=EngineKind.VLLM)
    return msgspec.structs.replace(of_ours, info=info, block_replay=replay)
