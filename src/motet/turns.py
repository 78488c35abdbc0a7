"""Work on the event loop that many tasks can have at the same time, with one limit of time for all of them together.

A task that yields to the loop after each piece of its work delays other tasks by the pieces of all such tasks: hundreds
of groups can end in the same step, and each has a piece to do. `in_turn` runs pieces until a turn of the loop has spent
`TURN_S` on them, and the rest in later turns, in the order in which they came. For work that is too short for a thread,
or that changes what the loop reads.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

from anyio.lowlevel import RunVar

T = TypeVar("T")

TURN_S = 0.004
"""Time after which the next piece waits for the next turn of the loop. A piece should not take much longer itself."""


async def in_turn(work: Callable[[], T]) -> T:
    """Runs a piece of work on the event loop and returns its result: at once, or in a later turn of the loop if this
    one has spent its time on such work."""
    if (turns := TURNS.get(None)) is None:
        TURNS.set(turns := LoopTurns(time.perf_counter))
    return await turns.run(work)


async def in_turns(items: Iterable[T], size: int) -> list[list[T]]:
    """Returns the items in lists of `size`. An iterable that computes its items computes each list `in_turn`."""
    left, lists = iter(items), list[list[T]]()

    while piece := await in_turn(lambda: [*islice(left, size)]):
        lists.append(piece)
    return lists


class LoopTurns:
    """The pieces of one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent_s = 0.0
        """Time spent on pieces in this turn."""
        self._waiting: deque[Callable[[], None]] = deque()
        """Pieces for later turns. Each sets the future of its caller."""
        self._scheduled = False
        """True if `_next_turn` will be called."""

    async def run(self, work: Callable[[], T]) -> T:
        if not self._waiting and self._spent_s < TURN_S:
            return self._timed(work)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(lambda: _set(done, work))
        self._schedule()
        return await done

    def _next_turn(self) -> None:
        self._scheduled, self._spent_s = False, 0.0
        while self._waiting and self._spent_s < TURN_S:
            self._timed(self._waiting.popleft())
        if self._waiting:
            self._schedule()

    def _timed(self, work: Callable[[], T]) -> T:
        self._schedule()
        start = self._clock()
        try:
            return work()
        finally:
            self._spent_s += self._clock() - start

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)


def _set(done: asyncio.Future[T], work: Callable[[], T]) -> None:
    """Sets the result of `work`, unless its caller was cancelled."""
    if done.cancelled():
        return
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)


TURNS: RunVar[LoopTurns] = RunVar("loop_turns")
"""The pieces of the running event loop."""
