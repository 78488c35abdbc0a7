"""Servers behind a gateway are restarted one after the other, and the gateway itself is killed, while clients send
requests. `e2e/test_gateway` and `hosts` test a server that is cut off and continues.

All tests of this module use the same two servers, and leave them running and idle.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.fault.children import (
    BODIES,
    LONG,
    PATH,
    Servers,
    answer,
    client_of,
    port_of,
    until_busy,
    until_state,
)
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WORKER_TIMEOUT = ("--worker-timeout", "30")
CLIENTS = len(BODIES)
PAUSE_S = 0.5
"""Time between the answer and the next request of a client. It leaves processor time for a server that starts."""


@pytest.fixture(scope="module")
async def both(long_folder: Path, forking: ForkingProcess) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        servers = Servers(long_folder, stack, forking)
        await servers.start(2)
        yield servers


@pytest.fixture
async def servers(both: Servers) -> AsyncIterator[Servers]:
    yield both
    await both.until_idle()


@pytest.fixture(scope="module")
async def expected(both: Servers) -> list[str]:
    """Returns the answers to BODIES from a server without faults."""
    async with client_of(both[0]) as http:
        return [await answer(http, body) for body in BODIES]


async def test_every_server_is_restarted_under_load_and_no_answer_is_lost(
    servers: Servers, expected: list[str]
) -> None:
    over, answered, answers = asyncio.Event(), asyncio.Event(), 0

    async def send_requests(number: int) -> None:
        nonlocal answers
        for place in itertools.count(number):
            if over.is_set():
                return
            kind = place % len(BODIES)
            assert await answer(http, BODIES[kind]) == expected[kind]
            answers += 1
            answered.set()
            await asyncio.sleep(PAUSE_S)

    async def other_server_answers() -> None:
        answered.clear()
        await answered.wait()

    async with (
        servers.gateway(servers[0].url, servers[1].url, settings=WORKER_TIMEOUT) as gateway,
        client_of(gateway) as http,
        asyncio.TaskGroup() as clients,
    ):
        for number in range(CLIENTS):
            clients.create_task(send_requests(number))
        for number in range(2):
            url, before = servers[number].url, answers
            await until_busy(http, url)
            await servers.restart(number, between=other_server_answers)
            await until_state(http, url, "ready")
            assert answers > before
        over.set()


async def test_a_killed_gateway_leaves_nothing_on_its_workers_and_the_next_one_serves(
    servers: Servers, expected: list[str]
) -> None:
    server = servers[0]
    async with servers.gateway(server.url, settings=WORKER_TIMEOUT) as gateway, client_of(gateway) as http:
        with pytest.raises(httpx.TransportError):
            async with http.stream("POST", PATH, json=LONG) as response:
                async for line in response.aiter_lines():
                    if line:
                        os.kill(gateway.pid, signal.SIGKILL)
        await servers.until_idle()
    async with (
        servers.gateway(server.url, settings=WORKER_TIMEOUT, port=port_of(gateway)) as gateway,
        client_of(gateway) as http,
    ):
        assert [await answer(http, body) for body in BODIES] == expected
