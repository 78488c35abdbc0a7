"""Responses of servers that send too much: what of them is in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from motet.batch.lines import BATCH_URLS, BatchLine
from motet.batch.response_memory import ResponseMemory
from motet.batch.run import failure_line
from motet.batch.sender import HttpSender
from motet.engines.refusals import ReplyVerdict

pytestmark = pytest.mark.anyio

PART_BYTES = 20_000
LIMIT, MAX_RESPONSE = 10 * PART_BYTES, 30 * PART_BYTES
NUM_REQUESTS = 8


@asynccontextmanager
async def spaces_server(*, status: int, num_parts: int | None, on_part: Callable[[], None]) -> AsyncIterator[str]:
    """A server whose responses are white space and, after `num_parts`, an object; None for endless responses."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d -\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" % status)
        number = 0
        with suppress(ConnectionError):
            while num_parts is None or number < num_parts:
                writer.write(b" " * PART_BYTES)
                await writer.drain()
                await asyncio.sleep(0)  # the responses arrive at the same time
                on_part()
                number += 1
            writer.write(b"{}")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("status", "num_parts"), [(200, 25), (200, None), (400, None)], ids=["large", "endless", "endless refusal"]
)
async def test_all_responses_together_have_a_limited_size(status: int, num_parts: int | None) -> None:
    memory = ResponseMemory(max_bytes=LIMIT, max_response_bytes=MAX_RESPONSE)
    sizes = [0]
    line = BatchLine("a", BATCH_URLS[0], b"{}")
    async with (
        spaces_server(status=status, num_parts=num_parts, on_part=lambda: sizes.append(memory.num_bytes)) as url,
        HttpSender(lambda: url, api_key=None, timeout_s=60.0, memory=memory) as sender,
    ):
        replies = await asyncio.gather(*(sender.send(line) for _ in range(NUM_REQUESTS)))
    assert max(sizes) <= LIMIT + MAX_RESPONSE
    assert memory.num_bytes == 0
    for reply in replies:
        if num_parts is None:
            assert reply.verdict is ReplyVerdict.FAILED
            assert f"a response of more than {MAX_RESPONSE} bytes".encode() in failure_line(line, reply)
        else:
            assert reply.verdict is ReplyVerdict.COMPLETED


async def test_a_request_that_ends_frees_its_memory_for_those_that_wait() -> None:
    memory, first, second = ResponseMemory(max_bytes=10), object(), object()
    await memory.take(first, 11)
    waiting = asyncio.create_task(memory.take(second, 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    await memory.take(first, 100)
    memory.free(first, 111)
    await waiting
    assert memory.num_bytes == 1
