"""A cell on a cluster that was there before: a node dies, and at the end only what belongs to the cell goes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from tests.fault.asked import CHAT, COUNTED, chat
from tests.fault.oracle import Undisturbed
from tests.ray.asking import LONG, streaming
from tests.ray.engines import Engines
from tests.ray.joined import ANSWER, FAR, STRANGER, Joined
from tests.ray.processes import check_gone, end, name_of
from tests.ray.running_ray import REPLICA, RunningRay
from tests.ray.their_cluster import TheirCluster

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.ray, pytest.mark.long]

PLACES = ("decode=decoder:1", "prefill=near:1", "gateway=near:1")


@pytest.fixture
async def nodes(engines: Engines) -> AsyncIterator[Joined]:
    theirs = TheirCluster(engines, far=True)
    yield await theirs.joined()
    await theirs.end()


async def test_a_node_that_dies_loses_no_choice_and_a_cluster_that_was_joined_stays(
    nodes: Joined, folder: Path, undisturbed: Undisturbed
) -> None:
    """Two answers begin, one on each node."""
    bodies = [chat(f"node dies {i}", COUNTED, n=8, max_tokens=LONG) for i in range(2)]
    expected = [await undisturbed.answer(CHAT, body) for body in bodies]
    places = [f"--resources-of={place}" for place in PLACES]
    async with RunningRay(folder, *places, joined=nodes, prefill=1, decode=2) as ray:
        await ray.until_whole()
        (far,) = [process for process in ray.processes if is_raylet_with(process, FAR)]
        node = [far, *far.children(recursive=True)]
        assert len([process for process in node if process in ray.replicas("decode")]) == 1
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(streaming(ray, CHAT, body)) for body in bodies]
            assert len({stream.worker for stream in streams}) == 2, "the two answers were written by one"
            end(node)
            readers = await asyncio.gather(*(stream.read_all() for stream in streams))
        assert [reader.complete() for reader in readers] == expected
        assert (await ray.totals()).choices_resumed == 8
        os.kill(ray.child.pid, signal.SIGTERM)
        assert await asyncio.to_thread(ray.child.wait) == 0
        check_gone(ray.named(f"{REPLICA}motet"))
        assert (await ray.http.get("/health")).status_code == 404
        assert (await ray.http.get(STRANGER)).text == ANSWER


def is_raylet_with(process: psutil.Process, resource: str) -> bool:
    name = name_of(process)
    return "/raylet/raylet" in name and f"{resource}," in name
