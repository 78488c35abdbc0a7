"""A limit of the choices that a client has in progress, which adapts to the load of the server.

A Motet server queues what it cannot run, so more choices never make it slower, and only refusals lower the limit.
`batch.concurrency` measures the throughput instead, since it is for servers of any kind."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

START_CHOICES: Final = 512
"""Number of choices in progress at the start. An engine runs 256 at a time by default; the others wait in the engine,
which then never waits for the client."""
MAX_CHOICES: Final = 4096
MIN_CHOICES: Final = 8
MAX_REQUESTS: Final = 256
"""Maximum number of requests in progress: a server has places for 256 groups that wait (`--max-waiting-groups`)."""
SHRINK_PAUSE_S: Final = 1.0
"""Minimum time between two reductions: the refusals of one moment count as one."""


class ChoiceLimit:
    """Starts requests in the order of their arrival, up to a limit of choices and of requests.

    A refusal of the server (429, 503) halves the limit, and each completed request raises it a little: additive
    increase and multiplicative decrease, as in TCP. A request with more choices than the limit runs alone.

    Belongs to one event loop."""

    def __init__(self, *, choices: int = START_CHOICES, requests: int = MAX_REQUESTS) -> None:
        self.choices = float(choices)
        """Current maximum of the choices in progress."""
        self._max_requests = requests
        self._open_choices = 0
        self._open_requests = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._shrunk_at_s = float("-inf")

    @contextlib.asynccontextmanager
    async def hold(self, num_choices: int) -> AsyncIterator[None]:
        """Waits until a request with this number of choices can start, and counts it until the end of the context."""
        await self._start(num_choices)
        try:
            yield
        finally:
            self._open_choices -= num_choices
            self._open_requests -= 1
            self._wake()

    def completed(self, num_choices: int) -> None:
        """Called when the server has completed a request."""
        self.choices = min(MAX_CHOICES, self.choices + num_choices / self.choices)

    def refused(self, now_s: float) -> None:
        """Called when the server has refused a request because of its load."""
        if now_s - self._shrunk_at_s >= SHRINK_PAUSE_S:
            self._shrunk_at_s = now_s
            self.choices = max(MIN_CHOICES, min(self.choices, self._open_choices) / 2)

    async def _start(self, num_choices: int) -> None:
        if self._waiting or not self._has_place(num_choices):
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (num_choices, place)
            self._waiting.append(entry)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():  # it was counted in the same moment
                    self._count(-num_choices, -1)
                else:
                    self._waiting.remove(entry)
                self._wake()
                raise
        else:
            self._count(num_choices, 1)

    def _has_place(self, num_choices: int) -> bool:
        fits = self._open_choices + num_choices <= self.choices and self._open_requests < self._max_requests
        return fits or not self._open_requests

    def _count(self, choices: int, requests: int) -> None:
        self._open_choices += choices
        self._open_requests += requests

    def _wake(self) -> None:
        while self._waiting and self._has_place(self._waiting[0][0]):
            num_choices, place = self._waiting.popleft()
            if not place.cancelled():
                self._count(num_choices, 1)
                place.set_result(None)
