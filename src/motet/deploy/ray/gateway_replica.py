"""A gateway replica: the gateway of `motet gateway`, whose workers are those that the directory lists."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from motet.deploy.gateway import Gateway
from motet.deploy.gateway_server import GatewayPlan, run_gateway
from motet.deploy.ray.directory import DirectoryClient
from motet.deploy.ray.following import Following, ListedWorkers
from motet.deploy.ray.running import RunningServer
from motet.deploy.server import Outcome
from motet.deploy.serving import Serving
from motet.deploy.stop import StopSignals
from motet.errors import EngineDiedError
from motet.types import Role


class RayGateway:
    """One replica, from `start` to `close`."""

    def __init__(self, plan: GatewayPlan, directory: DirectoryClient) -> None:
        self._following = Following(directory)
        self._plan = replace(plan, listed=ListedWorkers(self._following, tuple(Role)))
        self._server = RunningServer[Gateway]()
        self._follow: asyncio.Task[None] | None = None

    @property
    def serving(self) -> Serving[Gateway]:
        return self._server.serving

    async def start(self) -> None:
        """Returns when a worker that answers requests is there. Raises StartupError; then nothing is left."""
        self._follow = asyncio.create_task(self._following.follow())
        try:
            await self._server.start(self._run)
        except BaseException:
            await self.close()
            raise

    def check(self) -> None:
        """Raises EngineDiedError if it is of no use any more."""
        self._server.check()
        if self._follow is None or self._follow.done():
            raise EngineDiedError("nobody follows the directory any more")

    async def close(self, *, at_once: bool = False) -> None:
        """Drains for as long as its settings allow, unless it is to end `at_once`. Twice changes nothing."""
        await self._server.stop(at_once=at_once)
        if self._follow is not None:
            self._follow.cancel()
            await asyncio.wait([self._follow])

    def _run(self, on_ready: Callable[[Serving[Gateway]], None], signals: StopSignals) -> Awaitable[Outcome]:
        return run_gateway(self._plan, on_ready=on_ready, signals=signals)
