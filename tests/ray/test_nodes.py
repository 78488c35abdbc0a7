"""A cell on an existing cluster: a node dies, and at the end only the cell's own processes end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from tests.fault.fault_requests import CHAT, COUNTED, chat
from tests.fault.oracle import Undisturbed
from tests.ray.engines import Engines
from tests.ray.existing_cluster import ExistingCluster
from tests.ray.joined_cluster import OTHER_ANSWER, OTHER_ROUTE, SECOND, Joined
from tests.ray.processes import check_gone, end, name_of
from tests.ray.running_ray import REPLICA, RunningRay
from tests.ray.streaming import LONG, streaming

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.ray, pytest.mark.long]

PLACES = ("decode=decoder:1", "prefill=first:1", "gateway=first:1")


@pytest.fixture
async def nodes(engines: Engines) -> AsyncIterator[Joined]:
    existing = ExistingCluster(engines, second_node=True)
    yield await existing.joined()
    await existing.end()


async def test_a_node_that_dies_loses_no_choice_and_the_joined_cluster_stays(
    nodes: Joined, folder: Path, undisturbed: Undisturbed
) -> None:
    """Two answers start, one on each node."""
    bodies = [chat(f"node dies {i}", COUNTED, n=8, max_tokens=LONG) for i in range(2)]
    expected = [await undisturbed.answer(CHAT, body) for body in bodies]
    places = [f"--resources-of={place}" for place in PLACES]
    async with RunningRay(folder, *places, joined=nodes, prefill=1, decode=2) as ray:
        await ray.until_idle()
        (raylet,) = [process for process in ray.processes if is_raylet_with(process, SECOND)]
        node = [raylet, *raylet.children(recursive=True)]
        assert len([process for process in node if process in ray.replicas("decode")]) == 1
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(streaming(ray, CHAT, body)) for body in bodies]
            assert len({stream.worker for stream in streams}) == 2, "one worker generated both answers"
            end(node)
            readers = await asyncio.gather(*(stream.read_all() for stream in streams))
        assert [reader.complete() for reader in readers] == expected
        assert (await ray.totals()).choices_resumed == 8
        os.kill(ray.child.pid, signal.SIGTERM)
        assert await asyncio.to_thread(ray.child.wait) == 0
        check_gone(ray.named(f"{REPLICA}motet"))
        assert (await ray.http.get("/health")).status_code == 404
        assert (await ray.http.get(OTHER_ROUTE)).text == OTHER_ANSWER


def is_raylet_with(process: psutil.Process, resource: str) -> bool:
    name = name_of(process)
    return "/raylet/raylet" in name and f"{resource}," in name
