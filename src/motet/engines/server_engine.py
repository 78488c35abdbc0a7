"""The base of engines on other servers: owns their running groups, calls and tasks, so that one call can end them."""

import asyncio
from collections.abc import Coroutine
from typing import Generic, Protocol, TypeVar

import msgspec

from motet.engines.wire import EngineReport
from motet.errors import EngineClosedError, EngineSilentError, MotetError
from motet.ids import RequestId
from motet.types import GenerateRequest

T = TypeVar("T")


class ServerGroup(Protocol):
    """A group on another server, which this server can end."""

    request: GenerateRequest

    def fail(self, error: MotetError) -> None:
        """Ends the group. Its reader gets `error`."""
        ...

    async def settled(self) -> None:
        """Waits until no task of the group is left."""
        ...


G = TypeVar("G", bound=ServerGroup)


class ServerEngine(Generic[G]):
    """Owns the groups and calls of one server process. `close` ends them, but not the server. A restarted server gets
    another object."""

    def __init__(self, name: str, report: EngineReport) -> None:
        """`name`: names the server in messages."""
        self.engine_id = report.engine_id
        """Identifies this start of the server."""
        self.info = msgspec.structs.replace(report.info, pid=None)
        self._name = name
        self._closed: EngineClosedError | None = None
        """Set by `close`. After that, no calls to the server are made."""
        self._groups: dict[RequestId, G] = {}
        self._calls: dict[asyncio.Timeout, MotetError | None] = {}
        """Running calls, each with the error that ended it, if any."""
        self._tasks: set[asyncio.Task[None]] = set()

    def take_facts(self, report: EngineReport) -> bool:
        """Stores the facts of a report. Returns True if the server has other weights or adapters than at the last
        report."""
        here, there = self.info, report.info
        new = (here.model_digest, here.adapters) != (there.model_digest, there.adapters)
        if new:
            self.info = msgspec.structs.replace(report.info, pid=None)
        return new

    def lost(self, error: MotetError) -> None:
        """Ends every running group, prefill and call with `error`, and closes their connections."""
        for group in list(self._groups.values()):
            group.fail(error)
        for call, ended_with in self._calls.items():
            if ended_with is None:
                self._calls[call] = error
                call.reschedule(asyncio.get_running_loop().time())

    def force_rejoin(self, error: MotetError) -> None:
        """Ends all groups with `error`, and makes the keeper join the server again, as if it had been restarted."""
        self.engine_id = ""
        self.lost(error)

    async def close(self) -> None:
        """Ends all groups, calls and tasks. Can be called twice."""
        if self._closed is None:
            self._closed = EngineClosedError(f"no more requests go to {self._name}: this server is closing")
        groups = list(self._groups.values())
        self.lost(self._closed)
        for group in groups:
            await group.settled()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def check(self) -> None:
        """Raises AssertionError unless everything has ended."""
        if self._groups or self._calls or self._tasks:
            left = f"groups {sorted(self._groups)}, {len(self._calls)} calls, {len(self._tasks)} tasks"
            raise AssertionError(f"still running on {self._name}: {left}")

    def forget(self, group: G) -> None:
        """Removes a group that has ended, unless another group with its id has replaced it."""
        if self._groups.get(group.request.request_id) is group:
            del self._groups[group.request.request_id]

    async def _call(self, call: Coroutine[None, None, T]) -> T:
        """Awaits the answer to a call to the server. `lost` ends it early."""
        if self._closed is not None:
            call.close()
            raise self._closed
        timeout = asyncio.timeout(None)
        self._calls[timeout] = None
        try:
            async with timeout:
                return await call
        except TimeoutError:
            raise self._calls[timeout] or EngineSilentError(f"{self._name} did not answer") from None
        finally:
            del self._calls[timeout]

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` in a task. `work` calls the server through `_call`, so `lost` ends it too."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
