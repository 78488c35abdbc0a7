"""Which line of a batch runs next, and when.

A line takes a slot while its request runs. The number of slots is `--batch-concurrency` minus the open groups of
clients, at least one. No slot is given while a group of a client waits for its first token. The owners of batches take
turns, and the lines of one owner keep their order."""

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine
from typing import Any

from motet.api.http.admission import Admission

MAX_LINE_BYTES_HELD = 64 * 2**20
"""Maximum size of all lines that wait for a slot or run. Each owner can have one line above it."""


class LineMemory:
    """Counts the bytes of the lines that wait or run."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES_HELD) -> None:
        self._max_bytes = max_bytes
        self._lines: Counter[str] = Counter()
        """Number of lines of each owner."""
        self._waiting: list[asyncio.Future[None]] = []
        self.num_bytes = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, owner: str, num_bytes: int) -> bool:
        """Waits until a line can be held, until `free`. Returns True."""
        while self._lines[owner] and self.num_bytes + num_bytes > self._max_bytes:
            change = asyncio.get_running_loop().create_future()
            self._waiting.append(change)
            try:
                await change
            except asyncio.CancelledError:
                if change in self._waiting:
                    self._waiting.remove(change)
                raise
        self._lines[owner] += 1
        self.num_bytes += num_bytes
        return True

    def free(self, owner: str, num_bytes: int) -> None:
        self._lines[owner] -= 1
        self.num_bytes -= num_bytes
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)


class LineTurns:
    """Gives slots to the lines of all batches, in turns of their owners."""

    def __init__(self, admission: Admission, *, maximum: int) -> None:
        self._admission = admission
        self._maximum = maximum
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The waiting lines of each owner that has any, in the order of the owners' turns."""
        self._changed = asyncio.Event()
        self.memory = LineMemory()
        self.running = 0
        """Number of slots that are taken."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: str) -> bool:
        """Waits for a slot, until `free`. Returns True."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._changed.set()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free()
            else:
                self._leave(owner, turn)
            raise
        return True

    def free(self) -> None:
        self.running -= 1
        self._changed.set()

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        """Removes a line that does not wait any more."""
        turns = self._waiting.get(owner, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]

    async def give(self) -> None:
        """Gives slots until it is cancelled, or the server drains."""
        self._admission.on_change = self._changed.set
        while not self._admission.draining:
            self._changed.clear()
            while self._waiting and self.running < self._allowed():
                self._give_one()
            await self._changed.wait()

    def _allowed(self) -> int:
        """Returns the number of slots that can be taken now."""
        if self._admission.waiting > self._admission.background_waiting:
            return 0
        return max(1, self._maximum - (self._admission.open - self._admission.background_open))

    def _give_one(self) -> None:
        owner, turns = self._waiting.popitem(last=False)
        turn = turns.popleft()
        if turns:
            self._waiting[owner] = turns
        if not turn.done():
            self.running += 1
            turn.set_result(None)


async def first_unless(stop: asyncio.Event, work: Coroutine[Any, Any, bool]) -> bool:
    """Returns the result of `work`, or False if `stop` is set before it is done; `work` is then cancelled."""
    if stop.is_set():
        work.close()
        return False
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
    return not working.cancelled() and working.result()
