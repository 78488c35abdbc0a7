"""The client leaves: at every stage its groups end at once, streamed or not, and release everything.

The engine takes a step only when the test allows it, so each test knows the state of the group.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.api.serving import Served, Serving, WatchedEngine, every_route, of_two, saying, streamed_or_not

pytestmark = pytest.mark.anyio

GROUPS = {"/v1/chat/completions": 1, "/v1/completions": 2, "/inference/v1/generate": 1}


async def gated(serve: Serving) -> tuple[Served, WatchedEngine]:
    """Returns a server whose choice 0 ends after two steps, while choice 1 continues."""
    engine = WatchedEngine(saying("a", "a much longer answer than the other"), gated=True)
    return await serve(engine=engine), engine


@asynccontextmanager
async def sending(served: Served, path: str, *, stream: bool) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """Sends a request for a client that waits for its answer, and leaves at the end of the block."""
    task = asyncio.create_task(served.http.post(path, json={**of_two(path), "stream": stream}))
    try:
        yield task
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def take_steps(engine: WatchedEngine, count: int) -> None:
    """Lets the engine run until every group has taken `count` steps."""
    while any(group.step < count for group in engine.open.values()):
        if engine.steps.locked():
            engine.steps.release()
        await asyncio.sleep(0)


@every_route
@streamed_or_not
@pytest.mark.parametrize("steps", [0, 1, 5], ids=["queued", "decoding", "one choice done"])
async def test_leaving_ends_the_groups(serve: Serving, path: str, stream: bool, steps: int) -> None:
    served, engine = await gated(serve)
    async with sending(served, path, stream=stream):
        for _ in range(GROUPS[path]):
            await engine.submitted.acquire()
        await take_steps(engine, steps)
        assert len(engine.open) == GROUPS[path]
        if steps == 5:
            assert all(len(group.unfinished) == 1 for group in engine.open.values())
    await served.until_empty()
    counted = f'motet:groups_total{{model_name="tiny",status="499"}} {GROUPS[path]}.0'
    assert counted in await served.metrics()


@every_route
async def test_leaving_in_the_middle_of_reading_a_stream_ends_the_groups(serve: Serving, path: str) -> None:
    served, engine = await gated(serve)
    engine.steps.release()
    engine.steps.release()
    async with served.http.stream("POST", path, json={**of_two(path), "stream": True}) as response:
        lines = response.aiter_lines()
        first = await anext(lines)
        assert json.loads(first.removeprefix("data: "))["choices"]
    await served.until_empty()


async def test_leaving_before_the_body_is_sent_opens_nothing(served: Served) -> None:
    await served.break_off("/v1/completions")
    assert served.engine.requests == []


async def test_other_groups_continue_when_a_client_leaves(serve: Serving) -> None:
    served, engine = await gated(serve)
    staying = await engine.start_request(served.complete("stay"))
    async with sending(served, "/v1/completions", stream=True):
        for _ in range(2):
            await engine.submitted.acquire()
    engine.go(100)
    assert (await staying).json()["choices"][0]["text"] == "a"
