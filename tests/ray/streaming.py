"""Streamed answers of a cell on Ray, and faults that are injected when an answer has started."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from tests.fault.answers import Answer, Body, Reader, lines_of, read
from tests.ray.processes import engine_of, let_run, resume
from tests.ray.running_ray import RunningRay

LONG, LONGEST = 260, 390
"""Number of tokens of a choice during which a fault is injected; the second is the maximum for the prompts of tests.
Eight choices of that length take half a second."""
STOPPED_S = 0.005
"""Time for which engines are stopped between two moments in which they run."""


class RayStream:
    """An answer that has started."""

    def __init__(self, response: httpx.Response) -> None:
        self.worker: str = response.headers["x-motet-worker"]
        self.reader = Reader()
        self.resume: Callable[[], None] = lambda: None
        """Resumes the engines, if they are stopped."""
        self._lines = lines_of(response)

    async def start(self) -> None:
        """Reads until every choice has a role, and at least one choice has a token."""
        await read(self._lines, self.reader, until=lambda reader: reader.chunks > len(reader.roles) > 0)

    async def read_all(self) -> Reader:
        self.resume()
        return await read(self._lines, self.reader)


@asynccontextmanager
async def streaming(ray: RunningRay, route: str, body: Body, *, session: str = "") -> AsyncIterator[RayStream]:
    headers = {"X-Session-ID": session} if session else {}
    async with ray.http.stream("POST", route, json=body, headers=headers) as response:
        assert response.status_code == httpx.codes.OK
        stream = RayStream(response)
        await stream.start()
        yield stream


@asynccontextmanager
async def unfinished(ray: RunningRay, route: str, body: Body, *, session: str = "") -> AsyncIterator[RayStream]:
    """Starts an answer that cannot end before `read_all`, however late this process reads its start: until then the
    engines that decode run for moments only, and are stopped in between."""
    engines = [engine_of(replica) for replica in ray.replicas("decode")]
    async with AsyncExitStack() as stack:
        stack.callback(resume, engines)
        opening = asyncio.create_task(stack.enter_async_context(streaming(ray, route, body, session=session)))
        while not opening.done():
            let_run(engines)
            await asyncio.wait([opening], timeout=STOPPED_S)
        stream = await opening
        stream.resume = lambda: resume(engines)
        yield stream


async def answer_with_fault(ray: RunningRay, route: str, body: Body, inject: Callable[[str], None]) -> Answer:
    """Calls `inject` with the name of the worker that generates the answer, when the answer has started."""
    async with unfinished(ray, route, body) as stream:
        inject(stream.worker)
        return (await stream.read_all()).complete()
