"""Server-sent events: what all streams have in common, whatever the dialect of their events.

Line ends: U+2028, U+2029 and U+0085 are escaped in all events. They are valid in JSON and do not end a
line of SSE, but several clients split the body with functions such as Python's `str.splitlines`, for which they do.

Keep-alive comments: `Pings` sends a comment while a stream has nothing to send, because its request waits, its prompt
is computed, or its worker was lost. The first comment follows the headers of the answer, so an error after it is an
event of the stream."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

CONTENT_TYPE = "text/event-stream; charset=utf-8"
PING = b": ping\n\n"
"""A comment, which clients ignore."""

_ESCAPES = {end.encode(): b"\\u%04x" % ord(end) for end in "\u2028\u2029\u0085"}
"""The line ends outside ASCII as UTF-8, and as JSON can write them in strings."""
_LINE_ENDS = tuple(_ESCAPES)
_FIRST_BYTES = {line_end[0] for line_end in _ESCAPES}


def with_escaped_line_ends(events: bytes) -> bytes:
    """Returns the same events, whose data is JSON, without line ends outside ASCII."""
    if not events.isascii() and _has_line_end(events):
        for line_end, escape in _ESCAPES.items():
            events = events.replace(line_end, escape)
    return events


def _has_line_end(events: bytes) -> bool:
    """Returns True for a line end outside ASCII. Searching for single bytes is twenty times as fast as for several."""
    for first in _FIRST_BYTES:
        place = events.find(first)
        while place >= 0:
            if events.startswith(_LINE_ENDS, place):
                return True
            place = events.find(first, place + 1)
    return False


class Pings:
    """Sends a ping whenever its stream was idle for a period, as an asynchronous context manager. A stream that was not
    idle gets the next ping after one to two periods. Only one ping is sent at a time, so a client that reads nothing
    gets no more of them."""

    def __init__(self, period_s: float, ping: Callable[[], Awaitable[None]]) -> None:
        """`period_s`: 0 for no pings. `ping`: sends one. It is cancelled if the stream ends first."""
        self.idle = True
        """The owner sets this to False when it sends something else."""
        self._period_s = period_s
        self._ping = ping
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None and self._pinging.cancel():
            await asyncio.wait((self._pinging,))

    def _wait(self) -> None:
        if self._period_s:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._end_period)

    def _end_period(self) -> None:
        if self.idle:
            self._pinging = asyncio.create_task(self._send())
        else:
            self.idle = True
            self._wait()

    async def _send(self) -> None:
        await self._ping()
        self._wait()
