"""Clients that send without end, slowly, or nothing: the limits of their cost for a server before their key is
checked."""

import asyncio
import gc
import socket
import struct
import tracemalloc
import weakref
from contextlib import AsyncExitStack

import pytest
from starlette.types import Receive, Scope, Send

from motet.deploy.connection import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, RESERVE, ConnectionLimits
from motet.deploy.listen import HttpServer
from motet.settings.server_config import ServerConfig
from tests.attack.hostile import MIB, flood, read_to_end, status
from tests.deploy.listening import left, serving

pytestmark = pytest.mark.anyio

GET = b"GET %b HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the complete body, except under /keyless, and answers. Under /stream the answer never ends."""
    while not scope["path"].startswith("/keyless") and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok", "more_body": scope["path"] == "/stream"})
    while scope["path"] == "/stream" and (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "piece"),
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
async def test_a_head_without_end_is_refused_and_not_kept(start: bytes, piece: bytes) -> None:
    async with serving(app) as (_, reader, writer):
        writer.write(start)
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


async def test_chunks_of_a_byte_do_not_count_as_a_head() -> None:
    async with serving(app) as (_, reader, writer):
        writer.write(CHUNKED)
        await flood(writer, b"1\r\na\r\n" * 1000, total=MAX_HEAD_BYTES * 3)
        writer.write(b"0\r\n\r\n")
        assert await status(reader) == 200


async def test_the_number_of_pipelined_requests_is_limited() -> None:
    async with serving(app) as (server, reader, writer):
        writer.write((GET % b"/stream" + b"\r\n") * (MAX_PIPELINED + 2))
        await read_to_end(reader)
        assert not server.server_state.connections


@pytest.mark.parametrize(
    "next_request",
    [GET % b"/" + b"\r\n", POST + b"content-length: 999999\r\n\r\n" + b"a" * 200_000],
    ids=["short", "long"],
)
async def test_a_client_that_leaves_ends_its_answer_even_with_a_request_after_it(next_request: bytes) -> None:
    async with serving(app) as (server, reader, writer):
        writer.write(GET % b"/stream" + b"\r\n" + next_request)
        await status(reader)
        await left(writer)
        await asyncio.gather(*server.server_state.tasks)


async def test_malformed_requests_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for malformed in (
        b"\x16\x03\x01 nonsense\r\n\r\n",
        GET % b"/" + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ):
        async with serving(app) as (_, reader, writer):
            writer.write(malformed)
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
async def test_a_request_that_does_not_come_in_time_ends_the_connection(sent: bytes, answer: int) -> None:
    async with serving(app, ConnectionLimits(receive_s=0.05, keep_alive_s=0.05), sent=sent) as (_, reader, _writer):
        assert await status(reader) == answer
        await read_to_end(reader)


async def test_an_idle_connection_stays_open_as_long_as_clients_keep_theirs() -> None:
    """Regression: connections were closed after 75 s, new ones after 60 s. The pools of Go and of hyper keep them for
    90 s, and a request on a closed connection is lost."""
    assert ServerConfig(served_model_name="").keep_alive_s >= 100
    async with serving(app, ConnectionLimits(receive_s=0.02, keep_alive_s=60)) as (_, reader, writer):
        for _ in range(2):
            await asyncio.sleep(0.1)
            writer.write(GET % b"/" + b"\r\n")
            assert await status(reader) == 200
            await reader.readuntil(b"0\r\n\r\n")


async def test_an_idle_connection_is_closed_in_the_end() -> None:
    async with serving(app, ConnectionLimits(keep_alive_s=0.05), sent=GET % b"/" + b"\r\n") as (_, reader, _writer):
        assert await status(reader) == 200
        await read_to_end(reader)


async def test_a_byte_on_an_idle_connection_starts_the_limit_of_a_head() -> None:
    async with serving(app, ConnectionLimits(receive_s=0.05, keep_alive_s=60)) as (_, reader, writer):
        await asyncio.sleep(0.1)
        writer.write(b"G")
        assert await status(reader) == 408


async def test_single_bytes_do_not_extend_the_time_limit() -> None:
    async with serving(app, ConnectionLimits(receive_s=0.2), sent=CHUNKED) as (_, reader, writer):

        async def drip() -> None:
            while True:
                writer.write(b"1\r\na\r\n")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert await status(reader) == 408
        dripping.cancel()


@pytest.mark.slow
async def test_a_body_that_is_not_read_is_dropped_and_ends_in_time() -> None:
    head = b"POST /keyless HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(app, ConnectionLimits(receive_s=0.3), sent=head) as (_, reader, writer):
        tracemalloc.start()
        try:
            flooding = asyncio.create_task(flood(writer, b"10000\r\n" + b"a" * 65536 + b"\r\n", total=10**12))
            assert await status(reader) == 200
            await flooding
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        finally:
            tracemalloc.stop()


async def test_a_long_answer_continues_if_its_client_starts_another_request() -> None:
    two = GET % b"/stream" + b"\r\n" + b"\r\n"
    async with serving(app, ConnectionLimits(receive_s=0.05), sent=two) as (server, reader, _writer):
        assert await status(reader) == 200
        await asyncio.sleep(0.1)
        (connection,) = server.server_state.connections
        assert not connection.transport.is_closing()


async def test_a_client_that_reads_nothing_of_its_answer_is_disconnected() -> None:
    disconnected = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = asyncio.create_task(writing(send))
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        disconnected.set()
        sending.cancel()

    async def writing(send: Send) -> None:
        while True:
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})

    async with serving(endless, ConnectionLimits(stalled_s=0.05)) as (_, _reader, writer):
        writer.write(GET % b"/" + b"\r\n")
        await disconnected.wait()


async def connected(server: HttpServer, stack: AsyncExitStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens another connection, which the server accepts or refuses."""
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.push_async_callback(left, writer)
    return reader, writer


async def test_the_connection_that_is_idle_for_longest_is_closed_for_a_new_one() -> None:
    async with serving(app, ConnectionLimits(max_connections=3)) as (server, reader, writer), AsyncExitStack() as stack:
        writer.write(GET % b"/" + b"\r\n")
        assert await status(reader) == 200
        others = [await connected(server, stack) for _ in range(20)]
        others[-1][1].write(GET % b"/" + b"\r\n")
        assert await status(others[-1][0]) == 200
        assert len(server.server_state.connections) <= 3
        await read_to_end(reader)


async def test_with_a_request_on_each_connection_health_is_still_reported() -> None:
    limits = ConnectionLimits(max_connections=2, mounted_at="/llm")
    async with serving(app, limits) as (server, *_), AsyncExitStack() as stack:
        for _ in range(2):
            reader, writer = await connected(server, stack)
            writer.write(GET % b"/stream" + b"\r\n")
            assert await status(reader) == 200
        paths = ((b"/health", 200), (b"/v1/models", 503), (b"/llm/health", 200), (b"/llmhealth", 503))
        for path, expected in paths:
            reader, writer = await connected(server, stack)
            writer.write(GET % path + b"\r\n")
            assert await status(reader) == expected
        assert b"retry-after: 1" in await read_to_end((await refused(server, stack))[0])
        for _ in range(2 * RESERVE):
            await connected(server, stack)
        reader, writer = await connected(server, stack)
        writer.write(GET % b"/health" + b"\r\n")
        assert await status(reader) == 200
        assert len(server.server_state.connections) <= 2 + RESERVE


@pytest.mark.slow
async def test_a_connection_that_is_reset_while_it_is_idle_is_not_kept_in_memory() -> None:
    """The timer of an idle connection would keep it, and what it has received, for a minute."""
    async with serving(app) as (server, reader, writer):
        writer.write(GET % b"/" + b"\r\n")
        assert await status(reader) == 200
        (connection,) = server.server_state.connections
        gone = asyncio.Event()
        weakref.finalize(connection, gone.set)
        del connection
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        while not gone.is_set():
            await asyncio.sleep(0.01)
            gc.collect()


async def refused(server: HttpServer, stack: AsyncExitStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connected(server, stack)
    writer.write(GET % b"/v1/models" + b"\r\n")
    return reader, writer
