"""Time in tests: a clock that the test sets, and turns of the event loop in place of waiting."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from motet.loop_budget import LoopBudget


class Clock:
    """A clock whose time a test sets."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class TurnCounter:
    """Counts the turns of the event loop that another task gets inside `with`."""

    def __init__(self) -> None:
        self.turns = 0

    def __enter__(self) -> "TurnCounter":
        self._task = asyncio.create_task(self._count())
        return self

    def __exit__(self, *_: object) -> None:
        self._task.cancel()

    async def _count(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


class CountedBudget(LoopBudget):
    """A budget that counts the pieces of work."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter)
        self.num_pieces = 0

    async def run(self, work: Callable[[], Any]) -> Any:
        self.num_pieces += 1
        return await super().run(work)


async def turn(times: int = 1) -> None:
    """Lets each task that can run take one step, this number of times."""
    for _ in range(times):
        await asyncio.sleep(0)


async def settle() -> None:
    """Runs all tasks until each of them waits for something that does not happen. No task in the tests takes more
    turns."""
    await turn(30)
