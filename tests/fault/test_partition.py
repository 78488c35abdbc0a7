"""The network between a gateway and a worker is cut without a word: nothing comes through and nothing is closed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.fault.test_rolling_restart import BODIES, PATH, SERVER, answer, running, texts_of, until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LONG = {**BODIES[1], "max_tokens": 400}


class Wire:
    """Passes bytes on between a port of its own and a server, until it is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        async with asyncio.TaskGroup() as ways:
            ways.create_task(self._pass_on(reader, other_writer))
            ways.create_task(self._pass_on(other_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        await self._whole.wait()  # the end of a connection does not get through either
        writer.close()


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[tuple[Wire, str]]:
    wire = Wire(int(url.rpartition(":")[2]))
    server = await asyncio.start_server(wire, "127.0.0.1", 0)
    try:
        yield wire, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        wire.mend()
        server.close()


async def state_of(http: httpx.AsyncClient, url: str, state: str) -> None:
    """Returns once the gateway sees the worker so."""
    while True:
        states = {one["address"]: one["state"] for one in (await http.get("/status")).json()["workers"]}
        if states.get(url) == state:
            return


async def test_a_worker_that_is_cut_off_is_done_without_and_used_again_when_it_is_back(folder: Path) -> None:
    async with (
        running("serve", str(folder), *SERVER) as near,
        running("serve", str(folder), *SERVER) as far,
        wire_to(far.url) as (wire, far_url),
        running("gateway", "--worker", far_url, "--worker-timeout", "2", "--admin-key", "operator") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        httpx.AsyncClient(base_url=near.url, timeout=60) as alone,
    ):
        expected = await answer(alone, LONG)
        async with http.stream("POST", PATH, json=LONG) as response:
            lines = response.aiter_lines()
            seen = [await anext(lines)]
            wire.cut()
            join = await http.post("/workers", json={"url": near.url}, headers={"authorization": "Bearer operator"})
            assert join.status_code == 201
            seen += [line async for line in lines]
        assert texts_of(httpx.Response(200, headers=response.headers, text="\n".join([*seen, ""]))) == expected
        assert (await http.get("/status")).json()["totals"]["choices_resumed"] == LONG["n"]
        await state_of(http, far_url, "silent")
        wire.mend()
        await state_of(http, far_url, "ready")
        await until_idle(far)
        await until_idle(near)
