"""Groups that are ended after so many turns of the event loop, wherever they have come to by then."""

import asyncio
from collections.abc import Awaitable

from motet.engines.base import GroupStream
from motet.errors import MotetError
from motet.types import GenerateRequest
from tests.routing.moving import Heard


async def turn(times: int = 1) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def read(stream: GroupStream, request: GenerateRequest, heard: Heard) -> None:
    """To the end or the error that ends it."""
    try:
        await heard.read(stream, request)
    except MotetError:
        return


async def read_and_ended(
    stream: GroupStream, request: GenerateRequest, turns: int, end: Awaitable[None]
) -> tuple[Heard, bool]:
    """What its reader heard, and whether it was over before it was ended: then nothing happens in later turns."""
    heard = Heard()
    reader = asyncio.ensure_future(read(stream, request, heard))
    await turn(turns)
    was_over = reader.done()
    await end
    await reader
    await stream.aclose()
    return heard, was_over
