"""An `HttpServer` with any app on a free loopback port, in the test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.types import ASGIApp

from motet.deploy.connection import ConnectionLimits
from motet.deploy.listen import HttpServer, listen, port_of
from motet.deploy.tls.certificates import Certificates


@asynccontextmanager
async def serving(
    app: ASGIApp, limits: ConnectionLimits | None = None, *, sent: bytes = b""
) -> AsyncIterator[tuple[HttpServer, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serves an app, and yields a connection to it. `sent`: sent before the server accepts the connection, so that it
    arrives within any time limit of the server."""
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(app, limits)
        client = socket.create_connection(("127.0.0.1", port_of(listener)))
        client.sendall(sent)
        client.setblocking(False)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            yield server, reader, writer
        finally:
            await left(writer)
            server.stop()
            await running


@asynccontextmanager
async def serving_https(
    app: ASGIApp, certificates: Certificates, limits: ConnectionLimits | None = None
) -> AsyncIterator[tuple[HttpServer, int]]:
    """Serves an app over TLS, and yields the server with its port."""
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(app, limits, certificates=certificates)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield server, port_of(listener)
        finally:
            server.stop(at_once=True)
            await running


async def left(writer: asyncio.StreamWriter) -> None:
    """Closes the client's side, in any state of the connection."""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
