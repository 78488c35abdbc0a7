"""Block events of a worker elsewhere: followed as long as it is the same, and never a trouble for it."""

import logging

import pytest

from motet.deploy.event_following import EventFollowing
from motet.routing.prefix_index import PrefixIndex
from tests.deploy.kept import Follows

pytestmark = pytest.mark.anyio

ID, HERE, THERE = "worker", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559"


async def test_what_a_worker_tells_goes_into_the_index_as_long_as_it_is_followed() -> None:
    index, follows = PrefixIndex(), Follows()
    following = EventFollowing(ID, index, follows)
    await following.follow("first", HERE)
    await follows.begun.acquire()
    assert index.blocks(ID) == 1
    await following.follow("first", None)
    assert (index.blocks(ID), follows.open) == (0, 0)


async def test_the_same_worker_is_followed_once_and_another_start_anew() -> None:
    follows = Follows()
    following = EventFollowing(ID, PrefixIndex(), follows)
    for engine_id, endpoint in (("first", HERE), ("first", HERE), ("second", HERE), ("second", THERE)):
        await following.follow(engine_id, endpoint)
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
        await following.follow("first", HERE)
        await follows.begun.acquire()
        await following.stop()
    assert "block events of worker are not followed any more" in caplog.text


async def test_an_endpoint_that_is_none_is_logged_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    following = EventFollowing(ID, PrefixIndex(), Follows())
    with caplog.at_level(logging.WARNING):
        await following.follow("first", "nowhere")
        await following.stop()
    assert "'nowhere' is no endpoint" in caplog.text
