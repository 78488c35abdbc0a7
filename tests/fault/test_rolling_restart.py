"""Servers behind a gateway are restarted one after the other, and the gateway itself, while clients ask."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from motet.deploy.child import ChildServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SERVER = ("--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1", "--dtype", "float32")
GATEWAY = ("--worker-timeout", "3")
BODIES: tuple[dict[str, object], ...] = tuple(
    {"prompt": prompt, "n": n, "max_tokens": 150, "seed": n, "ignore_eos": True, "stream": stream}
    for prompt, n, stream in (("the hand", 1, True), ("the sand", 8, True), (["an ant", "a tent"], 3, False))
)
CLIENTS = 4
PATH = "/v1/completions"


@asynccontextmanager
async def running(command: str, *arguments: str, port: int = 0) -> AsyncIterator[ChildServer]:
    child = ChildServer(arguments, command=command, port=port)
    await asyncio.to_thread(child.__enter__)
    try:
        yield child
    finally:
        await asyncio.to_thread(child.__exit__, None, None, None)


def port_of(server: ChildServer) -> int:
    return int(server.url.rpartition(":")[2])


async def answer(http: httpx.AsyncClient, body: dict[str, object]) -> str:
    """Whole; of a stream all its chunks but what differs from answer to answer."""
    response = await http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    assert '"error"' not in response.text, response.text
    return texts_of(response)


def texts_of(response: httpx.Response) -> str:
    texts: dict[int, str] = {}
    finishes: dict[int, int] = {}
    if "event-stream" in response.headers["content-type"]:
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        chunks = [httpx.Response(200, content=line).json() for line in lines[:-1]]
    else:
        chunks = [response.json()]
    for choice in itertools.chain.from_iterable(chunk["choices"] for chunk in chunks):
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        finishes[index] = finishes.get(index, 0) + (choice["finish_reason"] is not None)
    assert set(finishes.values()) == {1}
    return str(sorted(texts.items()))


async def until_ready(http: httpx.AsyncClient, server: ChildServer) -> None:
    """As the gateway sees it."""
    while True:
        states = {one["address"]: one["state"] for one in (await http.get("/status")).json()["workers"]}
        if states[server.url] == "ready":
            return


async def until_idle(server: ChildServer) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        while True:
            (worker,) = (await http.get("/status")).json()["workers"]
            if (worker["groups_running"], worker["choices_waiting"], worker["blocks_used"]) == (0, 0, 0):
                return


async def expected_from(server: ChildServer) -> list[str]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        return [await answer(http, body) for body in BODIES]


async def test_every_server_is_restarted_under_load_and_no_answer_is_lost(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        serve = ("serve", str(folder), *SERVER)
        servers = [await stack.enter_async_context(running(*serve)) for _ in range(2)]
        expected = await expected_from(servers[0])
        workers = [part for server in servers for part in ("--worker", server.url)]
        async with (
            running("gateway", *workers, *GATEWAY) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        ):
            over, answers = asyncio.Event(), 0

            async def ask_on_and_on(number: int) -> None:
                nonlocal answers
                for place in itertools.count(number):
                    if over.is_set():
                        return
                    kind = place % len(BODIES)
                    assert await answer(http, BODIES[kind]) == expected[kind]
                    answers += 1

            async with asyncio.TaskGroup() as clients:
                for number in range(CLIENTS):
                    clients.create_task(ask_on_and_on(number))
                for number, server in enumerate(servers):
                    before = answers
                    os.kill(server.pid, signal.SIGTERM)
                    assert await asyncio.to_thread(server.wait) == 0
                    servers[number] = await stack.enter_async_context(running(*serve, port=port_of(server)))
                    await until_ready(http, servers[number])
                    assert answers > before  # the other one answered meanwhile
                over.set()
            for server in servers:
                await until_idle(server)


async def test_a_gateway_that_is_killed_leaves_nothing_on_its_workers_and_the_next_one_serves(folder: Path) -> None:
    long = {**BODIES[1], "max_tokens": 400}
    async with running("serve", str(folder), *SERVER) as server:
        (alone, *_) = [await expected_from(server)]
        async with running("gateway", "--worker", server.url, *GATEWAY) as gateway:
            port = port_of(gateway)
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
                with pytest.raises(httpx.TransportError):
                    async with http.stream("POST", PATH, json=long) as response:
                        async for line in response.aiter_lines():
                            if line:
                                os.kill(gateway.pid, signal.SIGKILL)
            await until_idle(server)
        async with (
            running("gateway", "--worker", server.url, *GATEWAY, port=port) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        ):
            assert [await answer(http, body) for body in BODIES] == alone
        await until_idle(server)
