"""The common part of engines on other servers: one call ends all groups, questions and tasks that are under way."""

import asyncio
from collections.abc import Coroutine
from typing import Generic, Protocol, TypeVar

import msgspec

from motet.engines.wire import EngineReport
from motet.errors import EngineClosedError, EngineSilentError, MotetError
from motet.ids import RequestId
from motet.types import GenerateRequest

T = TypeVar("T")


class FarGroup(Protocol):
    """A group on another server, which can be ended from here."""

    request: GenerateRequest

    def fail(self, error: MotetError) -> None:
        """Ends the group; its reader gets `error`."""
        ...

    async def settled(self) -> None:
        """Returns when no task of the group is left."""
        ...


G = TypeVar("G", bound=FarGroup)


class FarEngine(Generic[G]):
    """Owns the groups and questions for one start of a server. Closing it ends these, and not the server."""

    def __init__(self, name: str, report: EngineReport) -> None:
        """`name`: names the server in messages."""
        self.engine_id = report.engine_id
        """Names this start of the server."""
        self.info = msgspec.structs.replace(report.info, pid=None)
        self._name = name
        self._closed: EngineClosedError | None = None
        """Set by `close`; after that the server is asked nothing more."""
        self._groups: dict[RequestId, G] = {}
        self._calls: dict[asyncio.Timeout, MotetError | None] = {}
        """The questions under way, each with the error that ended it, if any."""
        self._tasks: set[asyncio.Task[None]] = set()

    def renewed(self, report: EngineReport) -> bool:
        """Takes the facts of a report. Returns True if the server has got new weights since the last one."""
        new = report.info.model_digest != self.info.model_digest
        if new:
            self.info = msgspec.structs.replace(report.info, pid=None)
        return new

    def lost(self, error: MotetError) -> None:
        """Ends every group, prefill and question under way with `error`, and closes their connections."""
        for group in list(self._groups.values()):
            group.fail(error)
        for call, ended_with in self._calls.items():
            if ended_with is None:
                self._calls[call] = error
                call.reschedule(asyncio.get_running_loop().time())

    def disown(self, error: MotetError) -> None:
        """Ends all groups with `error`, and lets its keeper meet the server anew, as if it had been started again."""
        self.engine_id = ""
        self.lost(error)

    async def close(self) -> None:
        """May be called twice."""
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
            left = f"groups {sorted(self._groups)}, {len(self._calls)} questions, {len(self._tasks)} tasks"
            raise AssertionError(f"left under way on {self._name}: {left}")

    def forget(self, group: G) -> None:
        """Removes a group that has ended, unless another one of its name has followed it."""
        if self._groups.get(group.request.request_id) is group:
            del self._groups[group.request.request_id]

    async def _call(self, question: Coroutine[None, None, T]) -> T:
        """Awaits the answer to `question`, which `lost` ends early."""
        if self._closed is not None:
            question.close()
            raise self._closed
        call = asyncio.timeout(None)
        self._calls[call] = None
        try:
            async with call:
                return await question
        except TimeoutError:
            raise self._calls[call] or EngineSilentError(f"{self._name} did not answer") from None
        finally:
            del self._calls[call]

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` in a task. It uses `_call` for questions, so `lost` ends it too."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
