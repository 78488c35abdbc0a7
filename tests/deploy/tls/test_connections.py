"""HTTPS on sockets: any size of data in both directions, handshakes that are slow, wrong or many, and the limits of
connections."""

import asyncio
import contextlib
import http.client
import ssl
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from motet.deploy.connection import RESERVE, ConnectionLimits
from motet.deploy.listen import HttpServer
from motet.deploy.tls.certificates import Certificates
from motet.deploy.tls.session import TlsSession
from tests.attack.hostile import MIB, flood, read_to_end, status
from tests.deploy.listening import serving_https
from tests.deploy.tls.authority import Authority

pytestmark = pytest.mark.anyio

GET = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n"
HELLO_START = b"\x16\x03\x01\x02\x00"
"""The first bytes of a handshake, whose rest never comes."""


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the body of a request back, and the scheme under /scheme. Under /stream the answer never ends."""
    body, more = b"", True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
    if scope["path"] == "/scheme":
        body = f"{scope['scheme']} {scope['client'][0]}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body, "more_body": scope["path"] == "/stream"})
    while scope["path"] == "/stream" and (await receive())["type"] != "http.disconnect":
        pass


async def connected(
    stack: AsyncExitStack, port: int, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    stack.push_async_callback(closed, writer)
    return reader, writer


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError, ssl.SSLError):
        await writer.wait_closed()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  the server sets no event
        await asyncio.sleep(0.001)


async def until_connections(server: HttpServer, number: int) -> None:
    await until(lambda: len(server.server_state.connections) == number)


async def read_body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


def post(body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def test_requests_and_answers_of_any_size_pass_one_connection(authority: Authority) -> None:
    async with serving_https(app, Certificates(authority.config())) as (_, port), AsyncExitStack() as stack:
        reader, writer = await connected(stack, port, authority.client())
        writer.write(GET % b"/scheme")
        assert await read_body(reader) == b"https 127.0.0.1"
        for size in (1, 16_384, 16_385, 200_000, 5 * MIB):
            body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            writer.write(post(body))
            assert await read_body(reader) == body


@pytest.mark.slow
async def test_a_client_that_reads_slowly_gets_all_data_and_the_server_encrypts_only_what_it_reads(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypted = 0
    real = TlsSession.encrypt

    def counted(self: TlsSession, data: bytes | memoryview) -> bytes:
        nonlocal encrypted
        encrypted += len(data)
        return real(self, data)

    monkeypatch.setattr(TlsSession, "encrypt", counted)
    size = 64 * MIB

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": b"x" * size})

    async with serving_https(large, Certificates(authority.config())) as (_, port), AsyncExitStack() as stack:
        reader, writer = await connected(stack, port, authority.client())
        writer.write(GET % b"/")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert encrypted < size // 2
        read = 0
        while read < size:
            read += len(await reader.read(MIB))
        assert (read, encrypted) == (size, size + len(head))


async def test_an_answer_that_closes_the_connection_is_complete(authority: Authority) -> None:
    body = b"x" * (4 * MIB)

    def answer() -> bytes:  # by a blocking client: uvloop's own clients lose data before the end of TLS
        line = http.client.HTTPSConnection("127.0.0.1", port, context=authority.client())
        with contextlib.closing(line):
            line.request("POST", "/", body, {"connection": "close"})
            return line.getresponse().read()

    async with serving_https(app, Certificates(authority.config())) as (server, port):
        assert await asyncio.to_thread(answer) == body
        await until(lambda: not server.server_state.connections)


async def test_a_refusal_reaches_a_client_that_still_sends(authority: Authority) -> None:
    async with serving_https(app, Certificates(authority.config())) as (server, port), AsyncExitStack() as stack:
        reader, writer = await connected(stack, port, authority.client())
        writer.write(b"GET /")
        flooding = asyncio.create_task(flood(writer, b"a" * 65536, total=MIB))
        assert await status(reader) == 431
        assert b"request_header_fields_too_large" in await read_to_end(reader)
        await flooding
        await until(lambda: not server.server_state.connections)


async def test_the_computations_of_handshakes_run_in_one_thread_and_not_on_the_event_loop(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    real = TlsSession.handshake

    def noted(self: TlsSession, received: bytes) -> bool:
        threads.add(threading.current_thread())
        return real(self, received)

    monkeypatch.setattr(TlsSession, "handshake", noted)
    async with serving_https(app, Certificates(authority.config())) as (_, port), AsyncExitStack() as stack:
        await asyncio.gather(*(connected(stack, port, authority.client()) for _ in range(8)))
    assert len(threads) == 1
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("sent", [b"", HELLO_START], ids=["nothing", "a part"])
async def test_a_client_that_does_not_finish_its_handshake_in_time_is_closed(authority: Authority, sent: bytes) -> None:
    limits = ConnectionLimits(receive_s=0.1)
    async with (
        serving_https(app, Certificates(authority.config()), limits) as (server, port),
        AsyncExitStack() as stack,
    ):
        reader, writer = await connected(stack, port, None)
        writer.write(sent)
        assert await read_to_end(reader) == b""
        await until(lambda: not server.server_state.connections)
        assert not limits.waiting


async def test_unfinished_handshakes_count_as_connections_and_the_oldest_gives_its_place_to_a_new_client(
    authority: Authority,
) -> None:
    limits = ConnectionLimits(max_connections=2)
    async with (
        serving_https(app, Certificates(authority.config()), limits) as (server, port),
        AsyncExitStack() as stack,
    ):
        slow = []
        for number in range(1, 3):
            slow.append(await connected(stack, port, None))
            slow[-1][1].write(HELLO_START)
            await until_connections(server, number)
        reader, writer = await connected(stack, port, authority.client())
        writer.write(GET % b"/scheme")
        assert await status(reader) == 200
        assert await read_to_end(slow[0][0]) == b""
        assert len(server.server_state.connections) == 2


async def test_when_all_connections_have_requests_others_are_refused_after_their_handshake(
    authority: Authority,
) -> None:
    limits = ConnectionLimits(max_connections=1)
    async with (
        serving_https(app, Certificates(authority.config()), limits) as (server, port),
        AsyncExitStack() as stack,
    ):
        _, busy = await connected(stack, port, authority.client())
        busy.write(GET % b"/stream")
        await until(lambda: server.server_state.tasks)
        reader, writer = await connected(stack, port, authority.client())
        writer.write(GET % b"/scheme")
        assert await status(reader) == 503


async def test_no_more_handshakes_are_open_than_connections_are_allowed(authority: Authority) -> None:
    limits = ConnectionLimits(max_connections=4)
    most = 0
    async with (
        serving_https(app, Certificates(authority.config()), limits) as (server, port),
        AsyncExitStack() as stack,
    ):
        for _ in range(4):
            _, writer = await connected(stack, port, authority.client())
            writer.write(GET % b"/stream")
        await until(lambda: len(server.server_state.tasks) == 4)
        for _ in range(RESERVE + 20):
            with suppress(OSError):
                await connected(stack, port, None)
            most = max(most, len(server.server_state.connections))
        assert most <= 4 + RESERVE + 1


async def test_a_client_of_plain_http_learns_that_the_port_accepts_https(authority: Authority) -> None:
    async with serving_https(app, Certificates(authority.config())) as (server, port), AsyncExitStack() as stack:
        reader, writer = await connected(stack, port, None)
        writer.write(GET % b"/")
        assert await status(reader) == 400
        assert b"accepts only HTTPS" in await read_to_end(reader)
        await until(lambda: not server.server_state.connections)


@pytest.mark.parametrize("after", [False, True], ids=["in the handshake", "after it"])
async def test_bytes_that_are_not_tls_end_only_their_connection(authority: Authority, after: bool) -> None:
    async with serving_https(app, Certificates(authority.config())) as (server, port), AsyncExitStack() as stack:
        reader, writer = await connected(stack, port, None)
        if after:
            session = client_session(authority)
            await finish(session, reader, writer)
        writer.write(b"\x16\x03\x01\x00\x05" + b"\xff" * 600)
        await read_to_end(reader)
        await until(lambda: not server.server_state.connections)
        reader, writer = await connected(stack, port, authority.client())
        writer.write(GET % b"/scheme")
        assert await status(reader) == 200


async def test_a_client_that_ends_tls_but_not_its_socket_has_disconnected(authority: Authority) -> None:
    async with serving_https(app, Certificates(authority.config())) as (server, port), AsyncExitStack() as stack:
        reader, writer = await connected(stack, port, None)
        session, received, unsent = client_session(authority)
        await finish((session, received, unsent), reader, writer)
        session.write(GET % b"/stream")
        writer.write(unsent.read())
        await until(lambda: server.server_state.tasks)
        with suppress(ssl.SSLError):
            session.unwrap()
        writer.write(unsent.read())
        await until(lambda: not server.server_state.tasks and not server.server_state.connections)


async def test_a_request_in_the_same_packet_as_the_end_of_the_handshake_is_answered(authority: Authority) -> None:
    async with serving_https(app, Certificates(authority.config())) as (_, port), AsyncExitStack() as stack:
        reader, writer = await connected(stack, port, None)
        session, received, unsent = client_session(authority)
        body = b"x" * 300_000
        await finish((session, received, unsent), reader, writer, request=post(body))
        answer = b""
        while not answer.endswith(body):
            received.write(await reader.read(MIB))
            with suppress(ssl.SSLWantReadError):
                while part := session.read(MIB):
                    answer += part


async def test_a_server_that_ends_closes_unfinished_handshakes(authority: Authority) -> None:
    async with AsyncExitStack() as stack:
        async with serving_https(app, Certificates(authority.config())) as (server, port):
            reader, writer = await connected(stack, port, None)
            writer.write(HELLO_START)
            await until(lambda: server.server_state.connections)
        assert await read_to_end(reader) == b""


Client = tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]


def client_session(authority: Authority) -> Client:
    received, unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
    return authority.client().wrap_bio(received, unsent, server_hostname="127.0.0.1"), received, unsent


async def finish(
    client: Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, request: bytes = b""
) -> None:
    """Does the handshake; sends `request` in the same packet as its last message."""
    session, received, unsent = client
    while True:
        try:
            session.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(unsent.read())
            received.write(await reader.read(MIB))
    if request:
        session.write(request)
    writer.write(unsent.read())
