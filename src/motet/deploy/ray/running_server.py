"""Runs a Motet server inside a replica, next to other tasks of the replica."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from motet.deploy.gateway import Gateway
from motet.deploy.ray.directory import DirectoryCopy, ListedWorkers, RayDirectory
from motet.deploy.server import Outcome, Serving, run_gateway
from motet.deploy.server_plan import GatewayPlan
from motet.deploy.shutdown import StopSignals, first_of
from motet.errors import EngineDiedError, StartupError
from motet.types import Role

logger = logging.getLogger(__name__)

W = TypeVar("W")


class ReplicaTasks(contextlib.AsyncExitStack):
    """The tasks and contexts of a replica in addition to its server, until `aclose`."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[None, None, None]) -> None:
        self.add(asyncio.create_task(work))

    def add(self, task: asyncio.Task[None]) -> None:
        self._tasks.append(task)
        self.push_async_callback(asyncio.wait, [task])

    def check(self) -> None:
        """Raises EngineDiedError if a task has ended: the replica cannot work without it."""
        for task in self._tasks:
            if task.done():
                error = None if task.cancelled() else task.exception()
                raise EngineDiedError("the replica has lost contact with the other replicas") from error

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await super().aclose()


class RunningServer(Generic[W]):
    """A server and the other tasks of its replica, from `start` to `close`."""

    def __init__(self) -> None:
        self.tasks = ReplicaTasks()
        self._signals = StopSignals()
        self._server: asyncio.Future[Outcome] | None = None
        self._serving: Serving[W] | None = None

    @property
    def serving(self) -> Serving[W]:
        assert self._serving is not None  # it was started
        return self._serving

    @property
    def serves(self) -> bool:
        return self._serving is not None and self._server is not None and not self._server.done()

    async def start(self, run: Callable[..., Awaitable[Outcome]]) -> None:
        """Waits until `run(on_ready=..., signals=...)` serves. Raises its errors, and can then be called again."""
        ready: asyncio.Future[Serving[W]] = asyncio.get_running_loop().create_future()
        self._server = asyncio.ensure_future(run(on_ready=ready.set_result, signals=self._signals))
        try:
            await first_of(asyncio.wait([ready]), asyncio.wait([self._server]))
        except asyncio.CancelledError:
            self._signals.drain.set()
            await self.ended()
            raise
        if not ready.done():
            raise StartupError(f"the server ended before it was ready: {self._server.result().name.lower()}")
        self._serving = ready.result()

    def check(self) -> None:
        """Raises EngineDiedError if the server or a task has ended."""
        if not self.serves:
            raise EngineDiedError("the server has ended")
        self.tasks.check()

    async def ended(self) -> None:
        """Returns when the server has ended, even by an error."""
        if self._server is not None:
            await asyncio.wait([self._server])

    async def close(self, *, at_once: bool = False) -> None:
        """Drains for `drain_timeout_s` of the settings, or ends the server `at_once`. Can be called twice."""
        self._signals.drain.set()
        if at_once:
            self._signals.at_once.set()
        await self.ended()
        await self.tasks.aclose()
        server, self._server = self._server, None
        if self._serving and server and not server.cancelled() and (error := server.exception()):
            logger.error("the server failed", exc_info=error)


async def running_gateway(plan: GatewayPlan, directory: RayDirectory) -> RunningServer[Gateway]:
    """Starts a gateway; returns when a listed worker is ready. Raises StartupError, with nothing left running."""
    copy = DirectoryCopy(directory)
    server = RunningServer[Gateway]()
    server.tasks.start(copy.follow())
    try:
        await server.start(partial(run_gateway, replace(plan, listed=ListedWorkers(copy, tuple(Role)))))
    except BaseException:
        await server.close()
        raise
    return server
