"""Clients that send without end, slowly, or nothing: what they may cost a server before their key is looked at."""

import asyncio
import tracemalloc
from contextlib import AsyncExitStack

import pytest
from starlette.types import Receive, Scope, Send

from motet.deploy.connection import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, RESERVE, ConnectionLimits
from motet.deploy.listen import HttpServer
from tests.attack.hostile import MIB, ended, flood, status
from tests.deploy.listening import left, serving

pytestmark = pytest.mark.anyio

GET = b"GET %b HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the whole body, except under /keyless, and answers; under /stream it never ends."""
    while not scope["path"].startswith("/keyless") and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok", "more_body": scope["path"] == "/stream"})
    while scope["path"] == "/stream" and (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begins", "piece"),
    [
        (b"GET /", b"a" * 65536),
        (GET % b"/", b"x: " + b"a" * 1000 + b"\r\n"),
        (GET % b"/" + b"x: ", b"a" * 65536),
        (GET % b"/", b"x:y\r\n" * 10_000),
        (CHUNKED + b"0\r\n", b"x: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"0\r\nx: ", b"a" * 65536),
        (CHUNKED + b"1;", b"a" * 65536),
        (b"", b"\r\n" * 30_000),
    ],
    ids=["path", "headers", "header", "small headers", "trailers", "trailer", "chunk's extension", "empty lines"],
)
async def test_a_head_without_end_is_refused_and_not_kept(begins: bytes, piece: bytes) -> None:
    async with serving(app) as (_, reader, writer):
        writer.write(begins)
        tracemalloc.start()
        try:
            flooding = asyncio.create_task(flood(writer, piece, total=16 * MIB))
            assert await status(reader) == 431
            assert b"request_header_fields_too_large" in await reader.readuntil(b"}}")
            await flooding
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 4 * MIB


async def test_a_large_head_and_many_headers_pass_below_the_limits() -> None:
    async with serving(app) as (_, reader, writer):
        headers = b"".join(b"x-%d: y\r\n" % number for number in range(MAX_HEADERS - 2))
        writer.write(GET % b"/" + headers + b"x: " + b"a" * (MAX_HEAD_BYTES - len(headers) - 100) + b"\r\n\r\n")
        assert await status(reader) == 200


async def test_chunks_of_a_byte_are_no_head() -> None:
    async with serving(app) as (_, reader, writer):
        writer.write(CHUNKED)
        await flood(writer, b"1\r\na\r\n" * 1000, total=MAX_HEAD_BYTES * 3)
        writer.write(b"0\r\n\r\n")
        assert await status(reader) == 200


async def test_requests_that_wait_for_the_answer_before_theirs_are_few() -> None:
    async with serving(app) as (server, reader, writer):
        writer.write((GET % b"/stream" + b"\r\n") * (MAX_PIPELINED + 2))
        await ended(reader)
        assert not server.server_state.connections


@pytest.mark.parametrize(
    "behind", [GET % b"/" + b"\r\n", POST + b"content-length: 999999\r\n\r\n" + b"a" * 200_000], ids=["short", "long"]
)
async def test_a_client_that_leaves_ends_its_answer_also_with_a_request_behind_it(behind: bytes) -> None:
    async with serving(app) as (server, reader, writer):
        writer.write(GET % b"/stream" + b"\r\n" + behind)
        await status(reader)
        await left(writer)
        await asyncio.gather(*server.server_state.tasks)


async def test_odd_requests_write_nothing_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for odd in (b"\x16\x03\x01 nonsense\r\n\r\n", GET % b"/" + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"):
        async with serving(app) as (_, reader, writer):
            writer.write(odd)
            assert await status(reader) in (200, 400)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", 0),
        (b"\r\n", 408),
        (GET % b"/", 408),
        (POST + b"content-length: 9\r\n\r\nhalf", 408),
        (CHUNKED + b"4\r\nhalf\r\n", 408),
    ],
    ids=["nothing", "empty line", "head", "body", "chunks"],
)
async def test_what_does_not_come_in_time_ends_the_connection(sent: bytes, answer: int) -> None:
    async with serving(app, ConnectionLimits(receive_s=0.05)) as (_, reader, writer):
        writer.write(sent)
        assert await status(reader) == answer
        await ended(reader)


async def test_a_byte_now_and_then_does_not_lengthen_the_time() -> None:
    async with serving(app, ConnectionLimits(receive_s=0.2)) as (_, reader, writer):
        writer.write(CHUNKED)

        async def drip() -> None:
            while True:
                writer.write(b"1\r\na\r\n")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert await status(reader) == 408
        dripping.cancel()


@pytest.mark.slow
async def test_a_body_that_nobody_reads_is_dropped_and_ends_in_time() -> None:
    async with serving(app, ConnectionLimits(receive_s=0.3)) as (_, reader, writer):
        writer.write(b"POST /keyless HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        tracemalloc.start()
        try:
            flooding = asyncio.create_task(flood(writer, b"10000\r\n" + b"a" * 65536 + b"\r\n", total=10**12))
            assert await status(reader) == 200
            await flooding
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        finally:
            tracemalloc.stop()


async def test_a_long_answer_goes_on_though_its_client_begins_another_request() -> None:
    async with serving(app, ConnectionLimits(receive_s=0.05)) as (server, reader, writer):
        writer.write(GET % b"/stream" + b"\r\n" + b"\r\n")
        assert await status(reader) == 200
        await asyncio.sleep(0.1)
        (connection,) = server.server_state.connections
        assert not connection.transport.is_closing()


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off() -> None:
    over = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = asyncio.create_task(writing(send))
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        over.set()
        sending.cancel()

    async def writing(send: Send) -> None:
        while True:
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})

    async with serving(endless, ConnectionLimits(stalled_s=0.05)) as (_, _reader, writer):
        writer.write(GET % b"/" + b"\r\n")
        await over.wait()


async def connected(server: HttpServer, stack: AsyncExitStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns a further connection, which the server has taken or refused."""
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.push_async_callback(left, writer)
    return reader, writer


async def test_the_connection_that_has_waited_longest_makes_room_for_a_new_one() -> None:
    async with serving(app, ConnectionLimits(max_connections=3)) as (server, reader, writer), AsyncExitStack() as stack:
        writer.write(GET % b"/" + b"\r\n")
        assert await status(reader) == 200
        others = [await connected(server, stack) for _ in range(20)]
        others[-1][1].write(GET % b"/" + b"\r\n")
        assert await status(others[-1][0]) == 200
        assert len(server.server_state.connections) <= 3
        await ended(reader)


async def test_with_a_request_on_each_connection_health_is_still_told() -> None:
    limits = ConnectionLimits(max_connections=2)
    async with serving(app, limits) as (server, *_), AsyncExitStack() as stack:
        for _ in range(2):
            reader, writer = await connected(server, stack)
            writer.write(GET % b"/stream" + b"\r\n")
            assert await status(reader) == 200
        for path, expected in ((b"/health", 200), (b"/v1/models", 503), (b"/health", 200)):
            reader, writer = await connected(server, stack)
            writer.write(GET % path + b"\r\n")
            assert await status(reader) == expected
        assert b"retry-after: 1" in await ended((await refused(server, stack))[0])
        for _ in range(2 * RESERVE):
            await connected(server, stack)
        reader, writer = await connected(server, stack)
        writer.write(GET % b"/health" + b"\r\n")
        assert await status(reader) == 200
        assert len(server.server_state.connections) <= 2 + RESERVE


async def refused(server: HttpServer, stack: AsyncExitStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connected(server, stack)
    writer.write(GET % b"/v1/models" + b"\r\n")
    return reader, writer
