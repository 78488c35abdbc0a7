"""The socket of a server, its HTTP connections, and the limits of its process."""

import asyncio
import gc
import resource
import socket
from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from motet.deploy.listen import HttpServer, allow_open_files, listen, port_of, url_at, url_of
from motet.deploy.server import freeze_heap
from motet.errors import ConfigError

NOFILE = resource.RLIMIT_NOFILE


def test_port_0_takes_a_free_one() -> None:
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        assert port_of(first) != port_of(second)
        assert url_of(first) == f"http://127.0.0.1:{port_of(first)}"


def test_a_taken_port_is_an_error_that_names_the_flag() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match=f"--port {port_of(taken)}: another program"):
        listen("127.0.0.1", port_of(taken))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a..b"])
def test_a_host_that_is_not_ours_is_an_error_that_names_the_flag(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host}"):
        listen(host, 0)


def test_a_url_is_one_that_a_client_on_this_machine_can_ask() -> None:
    assert url_at("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert url_at("::", 8000) == "http://[::1]:8000"
    assert url_at("10.0.0.7", 8000) == "http://10.0.0.7:8000"


@pytest.mark.anyio
async def test_accepted_connections_send_small_writes_at_once() -> None:
    """Otherwise the second of two steps that come together waits until the first is acknowledged, up to 40 ms."""
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(FastAPI(openapi_url=None))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        writer.write(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()
        server.stop()
        await serving


@pytest.fixture
def hard() -> Iterator[int]:
    """Lowers this process's own limit for the length of a test, and yields the system's."""
    soft, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (512, hard))
    yield hard
    resource.setrlimit(NOFILE, (soft, hard))


def test_a_low_limit_is_raised_to_what_is_wanted(hard: int) -> None:
    assert allow_open_files(600) == 600
    assert resource.getrlimit(NOFILE) == (600, hard)


def test_a_limit_is_raised_no_further_than_the_system_allows(hard: int) -> None:
    wanted, given = (700, 700) if hard == resource.RLIM_INFINITY else (hard + 1, hard)
    assert allow_open_files(wanted) == given
    assert resource.getrlimit(NOFILE) == (given, hard)


def test_a_higher_limit_is_left_alone(hard: int) -> None:
    assert allow_open_files(100) == 512
    assert resource.getrlimit(NOFILE) == (512, hard)


def test_the_garbage_collector_skips_objects_that_were_there_at_the_start() -> None:
    gc.collect()  # tests before it may have left more than half of them behind
    tracked, frozen = len(gc.get_objects()), gc.get_freeze_count()
    freeze_heap()
    assert gc.get_freeze_count() - frozen > tracked / 2
    assert len(gc.get_objects()) < tracked / 2
