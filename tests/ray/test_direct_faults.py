"""Faults with direct ingress: the decode replica holds the streams of clients, which no other replica can continue."""

import asyncio
import os
import signal

import httpx
import pytest

from motet.settings.ray_config import Ingress
from tests.fault.answers import fetch_answer
from tests.fault.fault_requests import CHAT, COUNTED, chat
from tests.fault.oracle import Undisturbed
from tests.ray.processes import check_gone, engine_of, folders, kill, stopped
from tests.ray.running_ray import RunningRay
from tests.ray.streaming import LONG, streaming, unfinished

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.parametrize("shared", [Ingress.DIRECT], indirect=True, scope="session"),
]

REPLACED_S = 150.0
"""Time within which Serve detects that a process has ended, and starts a new one."""


async def test_an_engine_that_dies_during_a_stream_restarts_and_the_answer_is_unchanged(
    ray: RunningRay, undisturbed: Undisturbed
) -> None:
    body = chat("engine dies", COUNTED, n=8, max_tokens=LONG)
    expected = await undisturbed.answer(CHAT, body)
    replicas = ray.replicas("decode")
    engine = engine_of(await ray.home_of("s"))
    async with unfinished(ray, CHAT, body, session="s") as stream:
        kill(engine)
        assert (await stream.read_all()).complete() == expected
    check_gone([engine])
    await ray.until_idle()
    assert ray.replicas("decode") == replicas


async def test_an_answer_whose_replica_is_killed_never_looks_complete(
    ray: RunningRay, undisturbed: Undisturbed
) -> None:
    """The directory is also killed, so prefill must announce itself again before the next replica can find it."""
    body = chat("replica dies", COUNTED, n=8, max_tokens=LONG)
    expected = await undisturbed.answer(CHAT, body)
    replicas, (directory,) = ray.replicas("decode"), ray.replicas("directory")
    replica = await ray.home_of("s")
    kill(directory)
    async with unfinished(ray, CHAT, body, session="s") as stream:
        kill(replica)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await stream.read_all()
        assert not stream.reader.done
    assert await fetch_answer(ray.http, CHAT, body) == expected
    await ray.until_idle(seconds=REPLACED_S)
    (new,) = set(ray.replicas("decode")) - set(replicas)
    before = await ray.totals()
    assert await fetch_answer(await ray.own(new), CHAT, body) == expected
    after = await ray.totals()
    assert (after.transfers - before.transfers, after.bypasses - before.bypasses) == (1, 0)


async def test_a_cell_that_is_ended_sends_an_error_event_to_a_stream_after_its_time(ending_ray: RunningRay) -> None:
    """Serve would kill the replica without an error event. The engine is stopped, so the answer would never end."""
    ray = ending_ray
    engine, started = engine_of(await ray.home_of("s")), ray.started
    async with streaming(ray, CHAT, chat("too long", COUNTED, n=8, max_tokens=LONG), session="s") as stream:
        with stopped(engine):
            os.kill(ray.child.pid, signal.SIGTERM)
            reader = await stream.read_all()
    assert reader.failure is not None
    assert (reader.failure.code, reader.done) == ("engine_closed", True)
    assert await asyncio.to_thread(ray.child.wait) == 0
    check_gone(started)
    assert not folders(started)
