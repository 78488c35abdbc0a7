"""Servers in processes of their own, as operators start them, and requests to them."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import msgspec

from bench.servers.ports import free_port
from motet.deploy.child import ChildServer
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.status import ReportedWorker
from tests.tiny_engine import TINY

PATH = "/v1/completions"
BODIES: tuple[dict[str, object], ...] = tuple(
    {"prompt": prompt, "n": n, "max_tokens": 60, "seed": n, "ignore_eos": True, "stream": stream}
    for prompt, n, stream in (("the hand", 1, True), ("the sand", 8, True), (["an ant", "a tent"], 3, False))
)
LONG: dict[str, object] = {**BODIES[1], "max_tokens": 4000}
"""A request whose answer, with the model of `long_folder`, does not end before a fault."""
POLL_S = 0.02


class ServerStatus(msgspec.Struct, frozen=True):
    workers: list[ReportedWorker]


class Servers:
    """Servers with the same model and settings. They end with `stack`."""

    def __init__(self, folder: Path, stack: AsyncExitStack, forking: ForkingProcess, *settings: str) -> None:
        self._arguments = (str(folder), *TINY, *settings)
        self._stack = stack
        self._forking = forking
        self._children: list[ChildServer] = []

    async def start(self, count: int) -> None:
        """Starts the servers at the same time, since each takes seconds."""
        starting = (self._running("serve", *self._arguments) for _ in range(count))
        self._children += await asyncio.gather(*map(self._stack.enter_async_context, starting))

    def __getitem__(self, number: int) -> ChildServer:
        return self._children[number]

    async def restart(self, number: int, *, between: Callable[[], Awaitable[None]] | None = None) -> None:
        """Restarts a server as an operator does: the old one ends its work, then a new one takes its port. `between` is
        awaited while neither runs."""
        old = self._children[number]
        os.kill(old.pid, signal.SIGTERM)
        assert await asyncio.to_thread(old.wait) == 0
        if between is not None:
            await between()
        new = self._running("serve", *self._arguments, port=port_of(old))
        self._children[number] = await self._stack.enter_async_context(new)

    async def until_idle(self) -> None:
        for child in self._children:
            async with client_of(child) as http:
                await until(http, lambda workers: all(worker.idle for worker in workers))

    @asynccontextmanager
    async def gateway(self, *urls: str, settings: tuple[str, ...] = (), port: int = 0) -> AsyncIterator[ChildServer]:
        """Runs a gateway in front of workers at these URLs."""
        workers = (part for url in urls for part in ("--worker", url))
        async with self._running("gateway", *workers, *settings, port=port) as gateway:
            yield gateway

    @asynccontextmanager
    async def _running(self, command: str, *arguments: str, port: int = 0) -> AsyncIterator[ChildServer]:
        """Runs a server. It picks a free port itself if none is given, so that its successor can have the same one."""
        child = self._forking.server(arguments, command=command, port=port or free_port())
        await asyncio.to_thread(child.__enter__)
        try:
            yield child
        finally:
            await asyncio.to_thread(child.__exit__, None, None, None)


def client_of(server: ChildServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S)


def port_of(server: ChildServer) -> int:
    return int(server.url.rpartition(":")[2])


async def until(http: httpx.AsyncClient, holds: Callable[[list[ReportedWorker]], bool]) -> None:
    """Polls the workers in `/status` until `holds` returns True for them."""

    async def poll() -> bool:
        response = await http.get("/status")
        return holds(msgspec.json.decode(response.content, type=ServerStatus).workers)

    while not await poll():  # noqa: ASYNC110  another process cannot set an event of this one
        await asyncio.sleep(POLL_S)


async def until_busy(http: httpx.AsyncClient, url: str) -> None:
    """Waits until the worker with that URL has a group of the gateway."""
    await until(http, lambda workers: any(worker.groups_running for worker in workers if worker.address == url))


async def until_state(http: httpx.AsyncClient, url: str, state: str) -> None:
    """Waits until the gateway reports the worker with that URL in that state."""
    await until(http, lambda workers: (url, state) in {(worker.address, worker.state) for worker in workers})


async def answer(http: httpx.AsyncClient, body: dict[str, object]) -> str:
    """Returns the texts of a complete or streamed answer as one string. Each choice must end exactly once."""
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
