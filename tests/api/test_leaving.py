"""The client leaves: at every stage its groups end at once, streamed or not, and nothing is left behind.

The engine takes a step only when told to, so each test knows where the group stands.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.api.serving import Served, Serving, WatchedEngine, saying

pytestmark = pytest.mark.anyio

ROUTES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 2},
    "/v1/completions": {"prompt": ["x", "y"], "n": 2},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"n": 2}},
}
GROUPS = {"/v1/chat/completions": 1, "/v1/completions": 2, "/inference/v1/generate": 1}

every_route = pytest.mark.parametrize("path", list(ROUTES))
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


async def gated(serve: Serving) -> tuple[Served, WatchedEngine]:
    """Choice 0 ends after two steps, choice 1 goes on."""
    engine = WatchedEngine(saying("a", "a much longer answer than the other"), gated=True)
    return await serve(engine=engine), engine


@asynccontextmanager
async def asking(served: Served, path: str, *, stream: bool) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A client that waits for its answer and leaves at the end of the block."""
    task = asyncio.create_task(served.http.post(path, json={**ROUTES[path], "stream": stream}))
    try:
        yield task
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def take_steps(engine: WatchedEngine, count: int) -> None:
    """Lets the engine go on until every group has taken so many steps."""
    while any(group.step < count for group in engine.open.values()):
        if engine.steps.locked():
            engine.steps.release()
        await asyncio.sleep(0)


@every_route
@streamed_or_not
@pytest.mark.parametrize("steps", [0, 1, 5], ids=["queued", "decoding", "one choice done"])
async def test_leaving_ends_the_groups(serve: Serving, path: str, stream: bool, steps: int) -> None:
    served, engine = await gated(serve)
    async with asking(served, path, stream=stream):
        for _ in range(GROUPS[path]):
            await engine.submitted.acquire()
        await take_steps(engine, steps)
        assert len(engine.open) == GROUPS[path]
        if steps == 5:
            assert all(len(group.unfinished) == 1 for group in engine.open.values())
    await served.until_empty()


@every_route
async def test_leaving_in_the_middle_of_reading_a_stream_ends_the_groups(serve: Serving, path: str) -> None:
    served, engine = await gated(serve)
    engine.steps.release()
    engine.steps.release()
    async with served.http.stream("POST", path, json={**ROUTES[path], "stream": True}) as response:
        lines = response.aiter_lines()
        first = await anext(lines)
        assert json.loads(first.removeprefix("data: "))["choices"]
    await served.until_empty()


async def test_leaving_before_the_body_is_sent_opens_nothing(served: Served) -> None:
    _reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await served.http.get("/health")).status_code == 200
    assert served.engine.requests == []


async def test_others_go_on_when_one_leaves(serve: Serving) -> None:
    served, engine = await gated(serve)
    staying = asyncio.create_task(served.complete("stay"))
    await engine.submitted.acquire()
    async with asking(served, "/v1/completions", stream=True):
        for _ in range(2):
            await engine.submitted.acquire()
    for _ in range(100):
        engine.steps.release()
    assert (await staying).json()["choices"][0]["text"] == "a"


async def test_client_that_left_counts_as_499(serve: Serving) -> None:
    served, engine = await gated(serve)
    async with asking(served, "/v1/chat/completions", stream=True):
        await engine.submitted.acquire()
    await served.until_empty()
    text = (await served.http.get("/metrics")).text
    assert 'motet:groups_total{model_name="tiny",status="499"} 1.0' in text
