"""The memory of the responses to a batch, limited for all requests together: a server can send large or endless ones.

A response takes memory from its first byte until it is written to a file. When the responses in progress have reached
the limit, no more is read of them, and the server waits as for any slow client. Only one response at a time is still
read, the first that exceeded the limit, so that requests never wait for each other. With it, the responses have at most
`max_bytes + max_response_bytes`."""

import asyncio

from motet.engines.http import MAX_ANSWER_BYTES

MAX_HELD_BYTES = 2**28


class ResponseMemory:
    """Counts the bytes of all responses that are in memory."""

    def __init__(self, *, max_bytes: int = MAX_HELD_BYTES, max_response_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.num_bytes = 0
        self.max_response_bytes = max_response_bytes
        self._max_bytes = max_bytes
        self._exceeding: object = None
        """The response that is read although the limit is reached; None if there is none."""
        self._freed = asyncio.Event()

    async def take(self, response: object, num_bytes: int) -> None:
        """Counts bytes of a response, when there is space for them."""
        while self._is_full(num_bytes) and self._exceeding not in (None, response):
            self._freed.clear()
            await self._freed.wait()
        if self._is_full(num_bytes):
            self._exceeding = response
        self.num_bytes += num_bytes

    def free(self, response: object, num_bytes: int) -> None:
        """Undoes `take` for all bytes of a response."""
        self.num_bytes -= num_bytes
        if self._exceeding is response:
            self._exceeding = None
        self._freed.set()

    def _is_full(self, num_bytes: int) -> bool:
        return self.num_bytes + num_bytes > self._max_bytes


class ArrivingBody:
    """The body of a response that arrives. Its bytes are counted while the context is entered."""

    def __init__(self, memory: ResponseMemory) -> None:
        self.received = bytearray()
        self._memory = memory

    def __enter__(self) -> "ArrivingBody":
        return self

    def __exit__(self, *error: object) -> None:
        self._memory.free(self, len(self.received))

    async def add(self, part: bytes) -> bool:
        """Adds a part when there is space for it. Returns False, without adding it, if the response is too large."""
        if len(self.received) + len(part) > self._memory.max_response_bytes:
            return False
        await self._memory.take(self, len(part))
        self.received += part
        return True
