"""Limits the time that all tasks together spend on long work in one iteration of the event loop.

Hundreds of tasks delay the others even if each yields to the loop after a short piece of work: many groups can end in
the same step, and each of them has such a piece. `within_loop_budget` runs pieces until an iteration has spent
`BUDGET_S` on them. The remaining pieces run in later iterations, in order of arrival.

It is meant for work that is too short for a thread, or that changes what other tasks on the loop read.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

from anyio.lowlevel import RunVar

T = TypeVar("T")

BUDGET_S = 0.004
"""Time in an iteration after which pieces wait for the next one. A single piece should not take much longer itself."""


async def within_loop_budget(work: Callable[[], T]) -> T:
    """Runs a piece of work on the event loop and returns its result: at once if this iteration has time left, otherwise
    in a later iteration."""
    if (budget := BUDGET.get(None)) is None:
        BUDGET.set(budget := LoopBudget(time.perf_counter))
    return await budget.run(work)


async def batched_within_loop_budget(items: Iterable[T], size: int) -> list[list[T]]:
    """Returns the items in lists of `size`. Each list is taken from the iterable as one piece of work."""
    left, lists = iter(items), list[list[T]]()

    while batch := await within_loop_budget(lambda: [*islice(left, size)]):
        lists.append(batch)
    return lists


class LoopBudget:
    """The time of one event loop for pieces of work, and the pieces that wait for it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent_s = 0.0
        """Time spent on pieces in this iteration."""
        self._waiting: deque[Callable[[], None]] = deque()
        """Pieces for later iterations. Each sets the future of its caller."""
        self._scheduled = False
        """True if `_next_iteration` will be called."""

    async def run(self, work: Callable[[], T]) -> T:
        if not self._waiting and self._spent_s < BUDGET_S:
            return self._timed(work)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(lambda: _set(done, work))
        self._schedule()
        return await done

    def _next_iteration(self) -> None:
        self._scheduled, self._spent_s = False, 0.0
        while self._waiting and self._spent_s < BUDGET_S:
            self._timed(self._waiting.popleft())
        if self._waiting:
            self._schedule()

    def _timed(self, work: Callable[[], T]) -> T:
        """Runs a piece of work, and adds its time to this iteration."""
        self._schedule()
        start = self._clock()
        try:
            return work()
        finally:
            self._spent_s += self._clock() - start

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_iteration)


def _set(done: asyncio.Future[T], work: Callable[[], T]) -> None:
    """Runs `work` and sets its result, unless the caller was cancelled."""
    if done.cancelled():
        return
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)


BUDGET: RunVar[LoopBudget] = RunVar("loop_budget")
"""The budget of the running event loop."""
