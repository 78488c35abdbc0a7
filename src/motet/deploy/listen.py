"""The listening socket of a server, and its HTTP side."""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from motet.api.http.streaming import WRITE_EXTENSION, Write
from motet.deploy.connection import ClientConnection, ConnectionLimits
from motet.engines.http import NO_FILES, NO_FILES_LEFT
from motet.errors import ConfigError
from motet.log import ONCE_A_MINUTE

logger = logging.getLogger(__name__)

Send = Callable[[dict[str, object]], Awaitable[None]]
BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Seconds; clients keep idle connections for less, so that none is closed while a request is on its way."""
LINGER_S = 3
"""Seconds after the end at which connections that are still open are cut."""
CUT_S = 0.1
"""The same seconds for a server that ends at once."""
LOOK_EVERY_S = 0.005
OPEN_FILES = 65_536
"""Wanted limit of open files: a gateway has five for each worker, and two for each group."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound, listening socket; port 0 takes a free one. Raises `ConfigError` naming the flag to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as exc:
        raise ConfigError(f"--host {host}: no such host: {exc}") from exc
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Every connection inherits this: without it a burst of small writes waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        said = {
            errno.EADDRINUSE: f"--port {port}: another program listens there; choose another port, or 0 for a free one",
            errno.EACCES: f"--port {port}: this user may not listen on port {port}; choose one above 1023",
            errno.EADDRNOTAVAIL: f"--host {host}: this machine has no such address",
        }
        raise ConfigError(said.get(exc.errno or 0, f"--host {host} --port {port}: {exc.strerror}")) from exc
    return listener


def port_of(listener: socket.socket) -> int:
    """Returns the real port of the socket, also if the setting was 0."""
    return int(listener.getsockname()[1])


def url_of(listener: socket.socket) -> str:
    """Returns the URL of the server for a client on this machine."""
    return url_at(listener.getsockname()[0], port_of(listener))


def url_at(host: str, port: int) -> str:
    """Returns the URL for a client on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


class HttpServer(uvicorn.Server):
    """Serves one app from `serve` to `stop`: uvicorn without its own handling of signals and logs.

    It ends when there is nothing to wait for. Uvicorn's own loops look ten times a second, once for each thing.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], limits: ConnectionLimits | None = None) -> None:
        """`app`: any ASGI application. In each scope is the extension `WRITE_EXTENSION`."""

        async def extended(scope: dict[str, object], *receive_and_send: Send) -> None:
            scope["extensions"] = {WRITE_EXTENSION: writer_of(receive_and_send[1])}
            await app(scope, *receive_and_send)

        config = uvicorn.Config(
            extended,
            http=cast(type[asyncio.Protocol], partial(ClientConnection, limits=limits or ConnectionLimits())),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # it warns of every odd request, and anybody may send a flood of them
            access_log=False,
            server_header=False,
            proxy_headers=False,  # `scope["client"]` is who holds the socket, whatever a header says
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LINGER_S,
        )
        super().__init__(config)
        self._told_to_stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals to the deployment: the first one drains, which uvicorn would not do."""
        yield

    def stop(self, *, at_once: bool = False) -> None:
        """Ends `serve` when open answers are complete, or without waiting for them."""
        self.should_exit = True
        self.force_exit = at_once
        self._told_to_stop.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_tell)
        await super().startup(sockets)

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # it writes the date that answers carry
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # unlike `wait_for` it makes no task
                    await self._told_to_stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S if self.force_exit else LINGER_S):
                while state.connections or state.tasks:  # noqa: ASYNC110  uvicorn sets no event
                    await asyncio.sleep(LOOK_EVERY_S)
        for task in state.tasks:
            task.cancel()


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs what asyncio reports. A connection that it cannot accept is tried again each second, with a traceback."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in NO_FILES:
        logger.error(NO_FILES_LEFT, extra=ONCE_A_MINUTE)
    else:
        loop.default_exception_handler(context)


def writer_of(send: Send) -> Write | None:
    """Returns what does uvicorn's `send` for a piece of a body, at less cost; None for any other `send`."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None
    flow, write = cycle.flow, cycle.transport.write

    def write_piece(piece: bytes) -> Awaitable[None] | None:
        if flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return send({"type": "http.response.body", "body": piece, "more_body": True})
        write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return None

    return write_piece


def allow_open_files(wanted: int = OPEN_FILES) -> int:
    """Raises this process's limit of open files to `wanted`, if the system allows it; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = wanted if hard == unlimited else min(wanted, hard)
    if soft == unlimited or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
