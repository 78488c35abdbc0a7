"""One HTTP connection with limits on the resources that a client can use. Uvicorn's own connections have none.

    handshake  with TLS, within `receive_s` (`deploy.tls`)
    waiting    there is no request: up to `keep_alive_s`, at the start and after an answer
    head       up to `MAX_HEAD_BYTES` and `MAX_HEADERS`, within `receive_s` of its first byte
    body       within `receive_s` of its head; the part that an answer does not read is discarded
    answer     the connection of a client that reads nothing for `STALLED_S` is closed

There are up to `max_connections`. When another client connects, the connection that has waited longest for a request is
closed. If all have a request, `RESERVE` more are accepted: all their requests get 503, except for health routes."""

import asyncio
import contextlib
import http
import importlib
import logging
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from motet.api.http.dialect import within_mount
from motet.api.http.failure import error_json
from motet.api.http.gate import OPEN_ROUTES
from motet.api.http.paths import usual_path
from motet.engines.wire import CERTIFICATE_REQUIRED
from motet.errors import OverloadedError, RequestError
from motet.settings.server_config import ServerConfig

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of a request's head, or of the framing between two body chunks. Common proxies allow a quarter of it."""
MAX_HEADERS = 200
MAX_PIPELINED = 4
"""Maximum number of requests that wait for the answer to an earlier one on the same connection. Clients of APIs do not
pipeline. Uvicorn stops reading while a request waits, and then does not detect that the client leaves."""
RESERVE = 64
"""Number of connections above the limit, for health checks."""
STALLED_S = 300.0
"""Time after which the connection of a client that does not read its answer is closed."""
LINGER_S = 2.0
"""Time that a client has to read the error with which its connection is closed."""
OPEN_FILES = 65_536
"""Requested limit of file descriptors. A gateway uses five for each worker, and two for each group."""
OPEN_FILES_MACOS = 10_240
"""Highest limit that macOS accepts, although it reports that there is no hard limit."""

resource: Any
"""The module with the limits of this process. None on Windows, where sockets are not file descriptors."""
try:
    resource = importlib.import_module("resource")
except ImportError:
    resource = None


class OpenConnection(Protocol):
    """A connection of a client, before or after its TLS handshake."""

    transport: asyncio.Transport

    def displace(self) -> None:
        """Closes the connection at once, so that another one can take its place."""


@dataclass
class ConnectionLimits:
    """The limits of one server's connections, and the connections that wait for a request."""

    receive_s: float = 60.0
    keep_alive_s: float = 120.0
    max_connections: int = 8192
    stalled_s: float = STALLED_S
    mounted_at: str = ""
    """Path in front of the routes (`--root-path`), which requests can leave out."""
    waiting: dict[OpenConnection, None] = field(default_factory=dict)
    """Connections that wait for a request, or whose TLS handshake is incomplete; the first one has waited longest."""
    next_warning_s: float = 0.0
    """Event-loop time before which "the connection limit is reached" is not logged again."""

    def admit(self, connection: OpenConnection, connections: Sized, *, now_s: float) -> bool:
        """Returns True if a new connection, which is already in `connections`, stays open. Above the limit,
        the connection that has waited longest is closed, and above the reserve the new one too."""
        if len(connections) > self.max_connections:
            self._warn_full(now_s)
            if self.waiting:
                next(iter(self.waiting)).displace()
        self.waiting[connection] = None
        if len(connections) > self.max_connections + RESERVE:
            connection.transport.abort()
            return False
        return True

    def _warn_full(self, now_s: float) -> None:
        if now_s >= self.next_warning_s:
            self.next_warning_s = now_s + 60.0
            log.warning("%d connections are open: the limit is reached (--max-connections)", self.max_connections)


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    """Returns the limits of a server. Half of the file descriptors are reserved for workers and engines: without a free
    one, a connection can be neither accepted nor refused."""
    maximum = config.max_connections
    if resource is not None and (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) != resource.RLIM_INFINITY:
        maximum = min(maximum, max(1, limit // 2))
    return ConnectionLimits(config.receive_timeout_s, config.keep_alive_s, maximum, mounted_at=config.root_path)


def allow_open_files(requested: int = OPEN_FILES) -> int | None:
    """Raises this process's limit of file descriptors to `requested`, or the permitted maximum. Returns the limit; None
    if the system has none."""
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    permitted = requested if hard == unlimited else min(requested, hard)
    for limit in (permitted, min(permitted, OPEN_FILES_MACOS)):
        if soft == unlimited or soft >= limit:
            break
        with contextlib.suppress(OSError, ValueError):  # higher than the system accepts
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return limit
    return int(soft)


class HeadTooLargeError(RequestError, status=431, code="request_header_fields_too_large"): ...


class RequestTimeoutError(RequestError, status=408, code="request_timeout"): ...


class CertificateRequiredError(RequestError, status=403, code=CERTIFICATE_REQUIRED): ...


class _Timer:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def start(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Starts the timer, from the beginning if it runs."""
        self.stop()
        self._handle = self._loop.call_later(delay_s, self._fire, callback)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, callback: Callable[[], None]) -> None:
        self._handle = None
        callback()


class ClientConnection(HttpToolsProtocol):
    """One connection. If a callback of the parser raises, the parsing ends, and `_refusal` is the answer."""

    def __init__(self, *, limits: ConnectionLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self.timeout_keep_alive = limits.keep_alive_s  # type: ignore[assignment]  # uvicorn's own timer takes any number
        self._deadline = _Timer(self.loop)
        """Ends the wait for a request, or for the rest of it."""
        self._stalled = _Timer(self.loop)
        self._unread_bytes = 0
        """Number of bytes received since the last byte of a body, or since the end of the last request."""
        self._in_body = False
        self._ended = False
        """True if an error has been sent that ends the connection; all further data of the client is discarded."""
        self._refusal: RequestError | OverloadedError | None = None
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the last request that was received."""
        self._lacks_certificate = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lacks_certificate = transport.get_extra_info("lacks_certificate", False)
        if self._limits.admit(self, self.connections, now_s=self.loop.time()):
            # Like after an answer: clients open connections in advance, and keep them with the used ones.
            self._deadline.start(self._limits.keep_alive_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.stop()
        self._stalled.stop()
        self._limits.waiting.pop(self, None)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset, uvicorn's timer would keep the connection in memory

    def displace(self) -> None:
        self._limits.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        is_first = not self._unread_bytes and not self._in_body
        self._unread_bytes += len(data)
        if is_first or not self._deadline.runs:
            self._expect_rest()
        super().data_received(data)
        if self._unread_bytes > MAX_HEAD_BYTES and not self._ended:
            self._refusal = HeadTooLargeError(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")
            self.send_400_response("")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS or len(name) + len(value) > MAX_HEAD_BYTES:
            self._refuse(HeadTooLargeError(f"The request has over {MAX_HEADERS} headers, or one is too long."))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(RequestError(f"More than {MAX_PIPELINED} requests wait on one connection."))
        if len(self.connections) > self._limits.max_connections and not self._is_health_request():
            self._refuse(OverloadedError("The server has reached its limit of connections. Try again later."))
        if self._lacks_certificate and not self._is_health_request():
            self._refuse(CertificateRequiredError("This server requires a client certificate from one of its CAs."))
        self._unread_bytes = 0
        self._limits.waiting.pop(self, None)
        self._in_body = True
        self._expect_rest()
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        if self.pipeline and len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT:
            self._refuse(RequestError("A request with a long body waits for the answer to an earlier one."))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        self._in_body = False
        self._deadline.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self._in_body:
            self._limits.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser fails, and here to refuse a request."""
        if self._answering or self.transport.is_closing():
            self.transport.abort()  # an error would be sent in the middle of an answer, or after its end
            return
        error = self._refusal or RequestError(msg)
        body, again = error_json(error), b"retry-after: 1\r\n" if error.retry_after_s else b""
        head = b"HTTP/1.1 %d %b\r\n%bcontent-length: %d\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
        phrase = http.HTTPStatus(error.status).phrase.encode()
        self.transport.write(head % (error.status, phrase, again, len(body)) + body)
        self._ended = True
        self._deadline.stop()
        self._limits.waiting[self] = None
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # A socket that is closed with unread data resets the connection, and the client can lose the answer.
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled.start(self._limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stalled.stop()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: RequestError | OverloadedError) -> None:
        """Ends the parsing with this error as the answer."""
        self._refusal = error
        raise error

    def _is_health_request(self) -> bool:
        path = httptools.parse_url(self.url).path.decode("latin-1")
        return usual_path(within_mount(path, self._limits.mounted_at)) in OPEN_ROUTES

    def _expect_rest(self) -> None:
        self._deadline.start(self._limits.receive_s, self._late)

    def _late(self) -> None:
        """Called when no request, or only a part of a request, was received in time."""
        if self.flow.read_paused:  # the server does not read
            self._expect_rest()
        elif self._in_body and not self.cycle.response_complete:
            self._end_late("body")
        elif self._in_body or not self._unread_bytes:
            self.transport.abort()
        elif not self._answering:  # an incomplete next request must not end the answer to this one
            self._end_late("head")

    def _end_late(self, what: str) -> None:
        self._refusal = RequestTimeoutError(
            f"The request's {what} was not received within {self._limits.receive_s:g} s."
        )
        self.send_400_response("")

    @property
    def _answering(self) -> bool:
        """True if an answer is being sent, or if an earlier request is answered before the last one."""
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and cycle.response_started and not cycle.response_complete)
