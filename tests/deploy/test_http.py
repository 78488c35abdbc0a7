"""The HTTP server's own connections."""

import asyncio
import socket

import pytest
from fastapi import FastAPI

from motet.deploy.http import HttpServer
from motet.deploy.listen import listen, port_of


@pytest.mark.anyio
async def test_accepted_connections_send_small_writes_at_once() -> None:
    """Else the second of two steps that come together waits for the first to be acknowledged: up to 40 ms."""
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(FastAPI(openapi_url=None), listener)
        serving = asyncio.create_task(server.run_until_stopped())
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
