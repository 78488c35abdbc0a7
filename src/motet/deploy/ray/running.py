"""A server of ours as a task of its replica, in place of a process of its own that signals end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from motet.deploy.server import Outcome
from motet.deploy.serving import Serving
from motet.deploy.stop import StopSignals, first_of
from motet.errors import EngineDiedError, StartupError

logger = logging.getLogger(__name__)

W = TypeVar("W")

Run = Callable[[Callable[[Serving[W]], None], StopSignals], Awaitable[Outcome]]
"""Runs the server until the signals say otherwise; the first argument is to be called once it serves."""


class RunningServer(Generic[W]):
    """From `start` to `stop`."""

    def __init__(self) -> None:
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

    async def start(self, run: Run[W]) -> None:
        """Returns once it serves. Raises what `run` raises; may be called again then."""
        ready: asyncio.Future[Serving[W]] = asyncio.get_running_loop().create_future()
        self._server = asyncio.ensure_future(run(ready.set_result, self._signals))
        try:
            await first_of(asyncio.wait([ready]), asyncio.wait([self._server]))
        except asyncio.CancelledError:
            await self.stop()
            raise
        if not ready.done():
            raise StartupError(f"the server ended before it was ready: {self._server.result().name.lower()}")
        self._serving = ready.result()

    def check(self) -> None:
        """Raises EngineDiedError if it has ended."""
        if not self.serves:
            raise EngineDiedError("the server has ended")

    async def ended(self) -> None:
        """Returns once it has ended, however it did."""
        if self._server is not None:
            await asyncio.wait([self._server])

    async def stop(self, *, at_once: bool = False) -> None:
        """Drains it first, for as long as its settings allow, unless it is to end `at_once`. Twice changes nothing."""
        self._signals.drain.set()
        if at_once:
            self._signals.at_once.set()
        await self.ended()
        if self._serving is not None and self._server is not None and (error := self._server.exception()):
            logger.error("the server failed", exc_info=error)
