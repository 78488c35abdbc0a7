"""The socket of a server, its HTTP connections, and the limits of its process."""

import asyncio
import gc
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from motet.api.http.streaming import WRITE_EXTENSION
from motet.deploy import connection
from motet.deploy.connection import allow_open_files, connection_limits
from motet.deploy.listen import HttpServer, listen, listening, port_of, url_at, url_of, writer_of
from motet.deploy.server import favour_streams
from motet.errors import ConfigError
from motet.settings.server_config import ServerConfig
from tests.deploy.listening import serving
from tests.patience import PATIENCE_S

CONFIG = ServerConfig(served_model_name="m")
NOFILE = resource.RLIMIT_NOFILE


def test_port_0_means_a_free_port() -> None:
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        assert port_of(first) != port_of(second)
        assert url_of(first) == f"http://127.0.0.1:{port_of(first)}"


def test_a_taken_port_is_an_error_that_names_the_flag() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match=f"--port {port_of(taken)}: another program"):
        listen("127.0.0.1", port_of(taken))


@pytest.mark.anyio
async def test_a_server_listens_on_a_unix_domain_socket(tmp_path: Path) -> None:
    """The file of a server that has ended is replaced, and removed at the end."""
    path = tmp_path / "motet.sock"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
    config = replace(CONFIG, uds=str(path))
    with listening(config) as listener:
        assert (port_of(listener), url_of(listener)) == (0, f"http+unix://{quote(str(path), safe='')}")
        server = HttpServer(FastAPI(openapi_url=None))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as http:
            assert (await http.get("http://anything/x")).status_code == 404
        with pytest.raises(ConfigError, match=r"--uds .*another program"), listening(config):
            pass
        server.stop()
        await running
    assert not path.exists()


@pytest.mark.parametrize("name", ["gone/motet.sock", "a file", "x" * 200])
def test_a_path_that_cannot_be_a_socket_is_an_error_that_names_the_flag(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("kept")
    with pytest.raises(ConfigError, match="--uds "), listening(replace(CONFIG, uds=str(tmp_path / name))):
        pass
    assert (tmp_path / "a file").read_text() == "kept"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a..b"])
def test_a_host_of_another_machine_is_an_error_that_names_the_flag(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host}"):
        listen(host, 0)


def test_a_url_can_be_reached_by_a_client_on_this_machine() -> None:
    assert url_at("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert url_at("::", 8000) == "http://[::1]:8000"
    assert url_at("10.0.0.7", 8000) == "http://10.0.0.7:8000"


@pytest.mark.anyio
async def test_accepted_connections_send_small_writes_at_once() -> None:
    """Otherwise the second of two steps in a row waits up to 40 ms until the first one is acknowledged."""
    async with serving(FastAPI(openapi_url=None)) as (server, reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_there_is_no_extension_for_a_send_other_than_uvicorns_own() -> None:
    async def send(message: dict[str, object]) -> None: ...

    assert writer_of(send) is None


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"6")]], ids=["chunks", "length"])
@pytest.mark.anyio
async def test_the_extension_sends_the_same_bytes_as_messages(method: str, headers: list[tuple[bytes, bytes]]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (b"one", b"two"):
            writing = scope["extensions"][WRITE_EXTENSION](piece) if scope["path"] == "/extension" else None
            if scope["path"] == "/messages":
                writing = send({"type": "http.response.body", "body": piece, "more_body": True})
            if writing is not None:
                await writing
        await send({"type": "http.response.body"})

    answers = []
    for path in ("messages", "extension"):
        async with serving(app) as (_, reader, writer):
            writer.write(f"{method} /{path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            answers.append((head.partition(b"date: ")[0], await reader.read()))
    assert answers[0] == answers[1]
    assert b"one" in answers[0][1] or method == "HEAD"


@pytest.mark.parametrize("version", ["1.0", "0.9"])
@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"6")]], ids=["no length", "length"])
@pytest.mark.anyio
async def test_a_client_of_http_1_0_gets_no_chunks(
    version: str, method: str, headers: list[tuple[bytes, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a stream had sizes of chunks, which such a client reads as a part of the body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        write = scope["extensions"][WRITE_EXTENSION]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (b"on", b"et"):
            await (
                send({"type": "http.response.body", "body": piece, "more_body": True})
                if write is None
                else write(piece)
            )
        await send({"type": "http.response.body", "body": b"wo"})

    async with serving(app) as (_, reader, writer):
        writer.write(f"{method} / HTTP/{version}\r\nhost: test\r\nconnection: keep-alive\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert body == (b"" if method == "HEAD" else b"onetwo")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert caplog.messages == []


@pytest.mark.parametrize("chunk", [b"", bytes(2**20)], ids=["waits", "is-not-read"])
@pytest.mark.anyio
async def test_an_answer_that_outlasts_its_server_ends_without_a_traceback(
    chunk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: if a client did not read when the server ended, uvicorn logged the CancelledError of its answer as an
    exception in the application."""
    started = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.set_result(asyncio.current_task())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    async with serving(app, sent=b"GET / HTTP/1.1\r\nhost: test\r\n\r\n") as (server, *_):
        answer = await started
        server.stop(at_once=True)
        await asyncio.wait([answer], timeout=PATIENCE_S)
        assert answer.done()
    assert caplog.messages == []


@pytest.mark.anyio
async def test_the_extension_waits_for_a_slow_reader_but_not_after_it_has_left() -> None:
    piece, written, gone = bytes(1 << 16), 0, asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal written
        write = scope["extensions"][WRITE_EXTENSION]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (writing := write(piece)) is None:
            written += 1
        slow.set()
        await writing
        written += 1
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        await write(piece)
        gone.set()

    slow = asyncio.Event()
    async with serving(app) as (_, reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        await asyncio.wait_for(slow.wait(), PATIENCE_S)
        await reader.readuntil(b"\r\n\r\n")
        size = written * (len(piece) + len(b"10000\r\n\r\n"))
        assert len(await reader.readexactly(size + len(piece))) > size, "the chunk that had to wait is sent, too"
    await asyncio.wait_for(gone.wait(), PATIENCE_S)


@pytest.fixture
def hard() -> Iterator[int]:
    """Lowers this process's own limit for the duration of a test, and yields the system's."""
    soft, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (512, hard))
    yield hard
    resource.setrlimit(NOFILE, (soft, hard))


def test_a_low_limit_is_raised_to_the_requested_one(hard: int) -> None:
    assert allow_open_files(600) == 600
    assert resource.getrlimit(NOFILE) == (600, hard)


def test_a_limit_is_raised_at_most_to_that_of_the_system(hard: int) -> None:
    requested, expected = (700, 700) if hard == resource.RLIM_INFINITY else (hard + 1, hard)
    assert allow_open_files(requested) == expected
    assert resource.getrlimit(NOFILE) == (expected, hard)


def test_connections_leave_half_of_the_open_files_to_workers(hard: int) -> None:
    def maximum(requested: int) -> int:
        return connection_limits(ServerConfig(served_model_name="", max_connections=requested)).max_connections

    assert (maximum(100), maximum(1000)) == (100, 256)


def test_a_higher_limit_is_not_changed(hard: int) -> None:
    assert allow_open_files(100) == 512
    assert resource.getrlimit(NOFILE) == (512, hard)


class MacLimits:
    """The limits of macOS: it reports that there is no hard limit, and refuses 10,241 descriptors."""

    RLIMIT_NOFILE, RLIM_INFINITY = 8, 2**63 - 1

    def __init__(self) -> None:
        self.soft = 256

    def getrlimit(self, kind: int) -> tuple[int, int]:
        return self.soft, self.RLIM_INFINITY

    def setrlimit(self, kind: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        self.soft = limits[0]


def test_a_limit_that_the_system_refuses_is_lowered_to_the_highest_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "resource", limits := MacLimits())
    assert allow_open_files() == limits.soft == 10_240
    assert allow_open_files() == 10_240


def test_a_system_without_a_limit_of_descriptors_permits_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "resource", None)
    assert allow_open_files() is None
    config = ServerConfig(served_model_name="", max_connections=100_000)
    assert connection_limits(config).max_connections == 100_000


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_garbage_collector_skips_objects_that_were_there_at_the_start() -> None:
    gc.collect()  # else most objects can be garbage of earlier tests
    tracked, frozen = len(gc.get_objects()), gc.get_freeze_count()
    favour_streams()
    assert gc.get_freeze_count() - frozen > tracked / 2
    assert len(gc.get_objects()) < tracked / 2


@pytest.mark.slow
def test_the_first_answer_loads_no_modules() -> None:
    """The bug: it loaded anyio's backend, which held the event loop for 20 to 50 ms."""
    code = """
import anyio, asyncio, sys
from motet.deploy.server import favour_streams

async def main():
    favour_streams()
    loaded = set(sys.modules)
    async with anyio.create_task_group():
        pass
    assert set(sys.modules) == loaded

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long
@pytest.mark.slow
def test_threads_allocate_memory_from_one_arena() -> None:
    """Regression: each thread had an arena of its own, and an API process grew by 27 MB per hour."""
    code = """
import ctypes, threading
from motet.deploy.server import share_arena
libc = ctypes.CDLL(None)
share_arena()
held = []
threads = [threading.Thread(target=lambda: held.append([bytes(1000) for _ in range(2000)])) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""
    for shared, arenas in ((code, 1), (code.replace("share_arena()\n", ""), 2)):
        report = subprocess.run([sys.executable, "-c", shared], capture_output=True, text=True, check=True).stdout
        assert min(report.count("<heap nr="), 2) == arenas
