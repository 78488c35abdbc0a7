"""The listening socket of a server, and its HTTP side."""

import asyncio
import contextlib
import errno
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from motet.api.http.streaming import WRITE_EXTENSION, Write
from motet.deploy.connection import ClientConnection, ConnectionLimits
from motet.deploy.tls.certificates import Certificates
from motet.deploy.tls.handshake import Handshakes
from motet.engines.http import NO_FILES, NO_FILES_LEFT
from motet.errors import ConfigError
from motet.log import ONCE_A_MINUTE
from motet.settings.server_config import ServerConfig

logger = logging.getLogger(__name__)

Send = Callable[[dict[str, object]], Awaitable[None]]
BACKLOG = 2048
LINGER_S = 3
"""Time from the end of the server until open connections are closed."""
CUT_S = 0.1
"""Time from the end of the server until open connections are closed, if the server ends at once."""
POLL_S = 0.005
CHUNKED_VERSIONS = ("1.1", "2.0")
"""Versions of HTTP whose clients understand chunks, as far as the parser accepts a version."""
PORT_OPTION = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
"""Socket option with which the port of a server that has just ended can be bound, but not the port of one that listens.
On Windows, SO_REUSEADDR would allow both."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound, listening socket; port 0 means any free port. Raises `ConfigError` with the flag to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as exc:
        raise ConfigError(f"--host {host}: no such host: {exc}") from exc
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, PORT_OPTION, 1)
        # Every connection inherits this option: without it, a burst of small writes waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        messages = {
            errno.EADDRINUSE: f"--port {port}: another program listens there; choose another port, or 0 for a free one",
            errno.EACCES: f"--port {port}: this user may not listen on port {port}; choose one above 1023",
            errno.EADDRNOTAVAIL: f"--host {host}: this machine has no such address",
        }
        raise ConfigError(messages.get(exc.errno or 0, f"--host {host} --port {port}: {exc.strerror}")) from exc
    return listener


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Yields the listening socket of these settings, and closes it at the end. Raises `ConfigError`."""
    if config.uds is None:
        with listen(config.host, config.port) as listener:
            yield listener
        return
    path = Path(config.uds).expanduser()
    with listen_at_path(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def listen_at_path(path: Path) -> socket.socket:
    """Returns a Unix domain socket that listens. Replaces the file of a server that has ended. Raises `ConfigError`."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("--uds: this system has no Unix domain sockets; use --host and --port")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with contextlib.suppress(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                raise ConfigError(f"--uds {path}: another program listens there")
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except ConfigError:
        listener.close()
        raise
    except OSError as exc:
        listener.close()
        raise ConfigError(f"--uds {path}: cannot listen there: {exc.strerror or exc}") from exc
    return listener


def port_of(listener: socket.socket) -> int:
    """Returns the actual port of the socket, even if the setting is 0; 0 for a Unix domain socket."""
    name = listener.getsockname()
    return 0 if isinstance(name, str) else int(name[1])


def url_of(listener: socket.socket, *, scheme: str = "http") -> str:
    """Returns the URL of the server for a client on this machine."""
    if isinstance(path := listener.getsockname(), str):
        return f"{scheme}+unix://{quote(path, safe='')}"
    return url_at(listener.getsockname()[0], port_of(listener), scheme=scheme)


def url_at(host: str, port: int, *, scheme: str = "http") -> str:
    """Returns the URL for a client on this machine."""
    return f"{scheme}://{address_at({'0.0.0.0': '127.0.0.1', '::': '::1'}.get(host, host), port)}"


def address_at(host: str, port: int) -> str:
    """Returns host and port as in a URL: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves one app from `serve` to `stop`: uvicorn without its own handling of signals and logs.

    It ends as soon as all answers are complete. Uvicorn's own loops check this only ten times a second."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        limits: ConnectionLimits | None = None,
        *,
        certificates: Certificates | None = None,
    ) -> None:
        """`app`: any ASGI application. Each scope contains the extension `WRITE_EXTENSION`. `certificates`: for HTTPS;
        without a certificate of this server, connections are not encrypted."""

        async def extended(scope: dict[str, object], *receive_and_send: Send) -> None:
            receive, send = receive_and_send
            if scope["http_version"] not in CHUNKED_VERSIONS:
                send = without_chunks(send)
            scope["extensions"] = {WRITE_EXTENSION: writer_of(send)}
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not self.should_exit:  # else `shutdown` has cancelled it, which uvicorn would log as an error
                    raise

        limits = limits or ConnectionLimits()
        connection: Callable[..., asyncio.Protocol] = partial(ClientConnection, limits=limits)
        self._handshakes: Handshakes | None = None
        if certificates is not None and certificates.for_clients is not None:
            self._handshakes = Handshakes(certificates, limits, make=connection)
            connection = self._handshakes.connection
        config = uvicorn.Config(
            extended,
            http=cast(type[asyncio.Protocol], connection),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # uvicorn warns about every malformed request, and any client can send many of them
            access_log=False,
            server_header=False,
            proxy_headers=False,  # `scope["client"]` is the peer of the socket, without regard to headers
            timeout_graceful_shutdown=LINGER_S,
        )
        super().__init__(config)
        self._stop_requested = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals to `StopSignals`: the first signal drains the server, which uvicorn cannot do."""
        yield

    def stop(self, *, at_once: bool = False) -> None:
        """Ends `serve` when open answers are complete, or `at_once`."""
        self.should_exit = True
        self.force_exit = at_once
        self._stop_requested.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_error)
        await super().startup(sockets)

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # it updates the date header of answers
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # unlike `wait_for`, it creates no task
                    await self._stop_requested.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        await self._until_idle(CUT_S if self.force_exit else LINGER_S)
        for connection in list(state.connections):
            connection.transport.abort()  # its answer ends as if the client had left
        await self._until_idle(CUT_S)
        for task in state.tasks:
            task.cancel()
        if self._handshakes is not None:
            self._handshakes.close()

    async def _until_idle(self, limit_s: float) -> None:
        """Waits until all connections are closed and all answers have ended, or for `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110  uvicorn sets no event
                    await asyncio.sleep(POLL_S)


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error of asyncio. For a connection that it cannot accept, asyncio would log a traceback each second."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in NO_FILES:
        logger.error(NO_FILES_LEFT, extra=ONCE_A_MINUTE)
    else:
        loop.default_exception_handler(context)


def writer_of(send: Send) -> Write | None:
    """Returns a faster function for sending body chunks if `send` is uvicorn's; None for any other `send`."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None
    flow, write = cycle.flow, cycle.transport.write

    def write_chunk(chunk: bytes) -> Awaitable[None] | None:
        if flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return send({"type": "http.response.body", "body": chunk, "more_body": True})
        write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return None

    return write_chunk


def without_chunks(send: Send) -> Send:
    """Returns a function that sends an answer to a client of HTTP/1.0 or older, if `send` is uvicorn's. Such a client
    would read the sizes of chunks as a part of the body. A body without a length ends with its connection instead."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return send

    has_length = True

    async def send_unchunked(message: dict[str, Any]) -> None:
        nonlocal has_length
        cycle.keep_alive = False
        if message["type"] == "http.response.start":
            has_length = b"content-length" in dict(message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        elif not (has_length or message.get("more_body")):
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares both at the end
        await send(message)

    return send_unchunked
