"""Asks a cluster for an answer, and strikes when the answer has begun."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

from tests.fault.answers import Answer, Body, Reader, lines_of, read
from tests.ray.running_ray import RunningRay

LONG, LONGEST = 260, 390
"""Tokens of a choice that is to be struck: as many as there is room for. Eight choices of them take half a second."""


class Streaming:
    """An answer that has begun."""

    def __init__(self, response: httpx.Response) -> None:
        self.worker: str = response.headers["x-motet-worker"]
        self.reader = Reader()
        self._lines = lines_of(response)

    async def begin(self) -> None:
        """Reads until every choice has a role, and some choice a token."""
        await read(self._lines, self.reader, until=lambda reader: reader.chunks > len(reader.roles) > 0)

    async def read_all(self) -> Reader:
        return await read(self._lines, self.reader)


@asynccontextmanager
async def streaming(ray: RunningRay, route: str, body: Body, *, session: str = "") -> AsyncIterator[Streaming]:
    headers = {"X-Session-ID": session} if session else {}
    async with ray.http.stream("POST", route, json=body, headers=headers) as response:
        assert response.status_code == httpx.codes.OK
        stream = Streaming(response)
        await stream.begin()
        yield stream


async def ask_and_strike(ray: RunningRay, route: str, body: Body, strike: Callable[[str], None]) -> Answer:
    """Calls `strike` with the name of the worker that writes the answer."""
    async with streaming(ray, route, body) as stream:
        strike(stream.worker)
        return (await stream.read_all()).complete()
