"""Streamed answers of a cell on Ray, and faults that are injected when an answer has started."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

from tests.fault.answers import Answer, Body, Reader, lines_of, read
from tests.ray.running_ray import RunningRay

LONG, LONGEST = 260, 390
"""Number of tokens of a choice during which a fault is injected; the second is the maximum for the prompts of tests.
Eight choices of that length take half a second."""


class RayStream:
    """An answer that has started."""

    def __init__(self, response: httpx.Response) -> None:
        self.worker: str = response.headers["x-motet-worker"]
        self.reader = Reader()
        self._lines = lines_of(response)

    async def start(self) -> None:
        """Reads until every choice has a role, and at least one choice has a token."""
        await read(self._lines, self.reader, until=lambda reader: reader.chunks > len(reader.roles) > 0)

    async def read_all(self) -> Reader:
        return await read(self._lines, self.reader)


@asynccontextmanager
async def streaming(ray: RunningRay, route: str, body: Body, *, session: str = "") -> AsyncIterator[RayStream]:
    headers = {"X-Session-ID": session} if session else {}
    async with ray.http.stream("POST", route, json=body, headers=headers) as response:
        assert response.status_code == httpx.codes.OK
        stream = RayStream(response)
        await stream.start()
        yield stream


async def answer_with_fault(ray: RunningRay, route: str, body: Body, inject: Callable[[str], None]) -> Answer:
    """Calls `inject` with the name of the worker that generates the answer, when the answer has started."""
    async with streaming(ray, route, body) as stream:
        inject(stream.worker)
        return (await stream.read_all()).complete()
