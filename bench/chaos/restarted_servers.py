"""Servers that run after a gateway. Each is started again under its address when it ends, as an orchestrator would
do."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from motet.deploy.child import ChildServer

STOPPED_S = 10.0
"""Time after which a stopped server is killed, as after a failed health check."""


class RestartedServer:
    """One server. `keep` starts it again until its task is cancelled."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._port = 0
        self._child: ChildServer | None = None

    @property
    def id(self) -> str:
        """The server's id in the gateway."""
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"http://{self.id}"

    async def start(self) -> None:
        child = ChildServer(self._arguments, port=self._port)
        await asyncio.to_thread(child.__enter__)
        self._child, self._port = child, int(child.url.rpartition(":")[2])

    async def keep(self) -> None:
        while self._child is not None:
            await asyncio.to_thread(self._child.wait, 3600.0)
            await self.end()
            await self.start()

    async def inject(self, number: signal.Signals) -> None:
        if self._child is None:
            return
        pid = self._child.pid
        os.kill(pid, number)
        if number is signal.SIGSTOP:
            await asyncio.sleep(STOPPED_S)
            os.kill(pid, signal.SIGKILL)

    async def end(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            await asyncio.to_thread(child.__exit__, None, None, None)


@asynccontextmanager
async def restarted_servers(model: str) -> AsyncIterator[list[RestartedServer]]:
    """Starts a prefill server and two decode servers, and restarts each that ends until the end of the context."""
    shared = [model, "--cluster-key", secrets.token_hex(16), "--side-channel-port", "0", "--threads", "1"]
    servers = [
        RestartedServer([*shared, "--role", role, "--drain-timeout", "3"]) for role in ("prefill", "decode", "decode")
    ]
    keeping: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(*(server.start() for server in servers))
        keeping = [asyncio.create_task(server.keep()) for server in servers]
        yield servers
    finally:
        for task in keeping:
            task.cancel()
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                await server.end()
        await asyncio.gather(*keeping, return_exceptions=True)
