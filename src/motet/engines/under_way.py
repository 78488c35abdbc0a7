"""What an engine has under way on another server: groups, questions and tasks, which one call ends."""

import asyncio
from collections.abc import Coroutine
from typing import Generic, Protocol, TypeVar

from motet.engines.base import WorkerState
from motet.engines.wire import EngineReport
from motet.errors import EngineClosedError, EngineDiedError, EngineSilentError, MotetError
from motet.ids import RequestId
from motet.types import EngineStats

T = TypeVar("T")


class FarGroup(Protocol):
    """A group there, as far as it is ended from here."""

    def fail(self, error: MotetError) -> None:
        """Ends it; its reader gets `error`."""
        ...

    async def settled(self) -> None:
        """Returns when no task of it is left."""
        ...


G = TypeVar("G", bound=FarGroup)


class UnderWay(Generic[G]):
    """Owns what one engine has asked `name` for."""

    def __init__(self, name: str) -> None:
        self.closed: EngineClosedError | None = None
        """Set by `close`: nothing is asked any more."""
        self._name = name
        self._groups: dict[RequestId, G] = {}
        self._calls: dict[asyncio.Timeout, MotetError | None] = {}
        """What is asked at this moment, and the error it was ended with."""
        self._tasks: set[asyncio.Task[None]] = set()

    def group(self, request_id: RequestId) -> G | None:
        return self._groups.get(request_id)

    def add(self, request_id: RequestId, group: G) -> None:
        self._groups[request_id] = group

    def over(self, request_id: RequestId, group: G) -> None:
        """It may have been followed by another one of its name."""
        if self._groups.get(request_id) is group:
            del self._groups[request_id]

    async def call(self, question: Coroutine[None, None, T]) -> T:
        """Asks, unless `lost` comes first."""
        if self.closed is not None:
            question.close()
            raise self.closed
        call = asyncio.timeout(None)
        self._calls[call] = None
        try:
            async with call:
                return await question
        except TimeoutError:
            raise self._calls[call] or EngineSilentError(f"{self._name} did not answer") from None
        finally:
            del self._calls[call]

    def start(self, work: Coroutine[None, None, None]) -> None:
        """In a task. What it asks, it asks by `call`, and so it ends with `lost`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lost(self, error: MotetError) -> None:
        """Ends every group and question with `error`. What comes after is asked as ever."""
        for group in list(self._groups.values()):
            group.fail(error)
        for call, ended_with in self._calls.items():
            if ended_with is None:
                self._calls[call] = error
                call.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """May be called twice."""
        if self.closed is None:
            self.closed = EngineClosedError(f"{self._name} is not asked any more: this server is closing")
        groups = list(self._groups.values())
        self.lost(self.closed)
        for group in groups:
            await group.settled()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def check(self) -> None:
        """Raises unless all has ended."""
        if self._groups or self._calls or self._tasks:
            left = f"groups {sorted(self._groups)}, {len(self._calls)} questions, {len(self._tasks)} tasks"
            raise AssertionError(f"left under way on {self._name}: {left}")


def stats_in(report: EngineReport, name: str) -> EngineStats:
    """Raises EngineDiedError or EngineSilentError if the engine of `name` told none."""
    if report.stats is not None:
        return report.stats
    if report.state is WorkerState.DEAD:
        raise EngineDiedError(f"{name} has lost its engine")
    raise EngineSilentError(f"the engine of {name} gives no sign of life")
