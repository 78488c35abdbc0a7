"""One HTTP connection, and what a client may make it cost: uvicorn's own has no limits.

    waiting    no request is here: up to `KEEP_ALIVE_S` after an answer, up to `receive_s` at the start
    head       up to `MAX_HEAD_BYTES` and `MAX_HEADERS`, within `receive_s` of its first byte
    body       within `receive_s` of its head; what an answer leaves unread is dropped
    answer     a client that takes nothing of it for `STALLED_S` is cut off

There are up to `max_connections`. For one more, the one that has waited longest is closed. If each has a request, a few
more are served: the routes that tell the server's health answer there, and every other route 503.
"""

import asyncio
import http
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from motet.api.http.failure import error_json
from motet.api.http.gate import OPEN_ROUTES
from motet.errors import OverloadedError, RequestError
from motet.settings.server_config import ServerConfig

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's head, or of what stands between two pieces of its body; proxies stop at a quarter of it."""
MAX_HEADERS = 200
MAX_PIPELINED = 4
"""Requests that wait for the answer before theirs; clients of APIs send none. Uvicorn would read nothing more while one
waits, and not notice that the client leaves."""
RESERVE = 64
"""Connections above the limit, for whoever asks for the server's health."""
STALLED_S = 300.0
LINGER_S = 2.0
"""Time that a client has to read why its connection ends."""


@dataclass
class ConnectionLimits:
    """The limits of one server's connections, and those that wait for a request."""

    receive_s: float = 60.0
    max_connections: int = 8192
    stalled_s: float = STALLED_S
    waiting: dict["ClientConnection", None] = field(default_factory=dict)
    """The one that has waited longest is the first."""
    silent_until: float = 0.0
    """The loop's time from which a line may say again that there are as many as may be."""

    def tell_full(self, now: float) -> None:
        if now >= self.silent_until:
            self.silent_until = now + 60.0
            log.warning("%d connections are open, as many as there may be (--max-connections)", self.max_connections)


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    """Half of the open files are for workers and engines; without one left, a connection can be neither taken nor
    refused."""
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = config.max_connections if open_files == resource.RLIM_INFINITY else max(1, open_files // 2)
    return ConnectionLimits(config.receive_timeout_s, min(config.max_connections, most))


class HeadTooLargeError(RequestError, status=431, code="request_header_fields_too_large"): ...


class RequestTimeoutError(RequestError, status=408, code="request_timeout"): ...


class ClientConnection(HttpToolsProtocol):
    """Callbacks of the parser that raise end its work: `refusal` is then the answer."""

    def __init__(self, *, limits: ConnectionLimits, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        """It ends the wait for a request, or for the rest of one."""
        self._stalled: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        """Bytes that came since the last byte of a body, or the last request's end."""
        self._in_body = False
        self._ended = False
        """True if the client has been told why its connection ends; what it still sends is dropped."""
        self._refusal: RequestError | OverloadedError | None = None
        self._answered: RequestResponseCycle | None = None
        """The request whose turn it is; `cycle` is the last one that has come."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self._limits
        if len(self.connections) > limits.max_connections:
            limits.tell_full(self.loop.time())
            if limits.waiting:
                next(iter(limits.waiting)).displace()
        limits.waiting[self] = None
        if len(self.connections) > limits.max_connections + RESERVE:
            transport.abort()
            return
        self._expect(self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._stop_stalled()
        self._limits.waiting.pop(self, None)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def displace(self) -> None:
        """Ends it at once, because another one takes its place."""
        self._limits.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unread_bytes += len(data)
        if self._deadline is None:
            self._expect(self._late)
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
        if len(self.connections) > self._limits.max_connections and not self._asks_for_health():
            self._refuse(OverloadedError("The server has as many connections as it takes. Try again later."))
        self._unread_bytes = 0
        self._limits.waiting.pop(self, None)
        self._in_body = True
        self._expect(self._late)
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        if self.pipeline and len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT:
            self._refuse(RequestError("A request with a long body waits for the answer before its own."))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        self._in_body = False
        self._expect(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self._in_body:
            self._limits.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Uvicorn calls it for whatever the parser does not take."""
        if self._answering or self.transport.is_closing():
            self.transport.abort()  # words would stand in the middle of an answer, or after its end
            return
        error = self._refusal or RequestError(msg)
        body, again = error_json(error), b"retry-after: 1\r\n" if error.retry_after_s else b""
        head = b"HTTP/1.1 %d %b\r\n%bcontent-length: %d\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
        phrase = http.HTTPStatus(error.status).phrase.encode()
        self.transport.write(head % (error.status, phrase, again, len(body)) + body)
        self._ended = True
        self._expect(None)
        self._limits.waiting[self] = None
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # A socket that is closed before all has been read resets the connection, and the client may lose the answer.
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_stalled()
        self._stalled = self.loop.call_later(self._limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stalled()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: RequestError | OverloadedError) -> None:
        """Ends the parser's work."""
        self._refusal = error
        raise error

    def _asks_for_health(self) -> bool:
        return httptools.parse_url(self.url).path.decode("latin-1") in OPEN_ROUTES

    def _expect(self, late: Callable[[], None] | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if late is None else self.loop.call_later(self._limits.receive_s, late)

    def _late(self) -> None:
        """The rest of a request did not come in time, or no request at all."""
        self._deadline = None
        if self.flow.read_paused:  # it is the server that is late
            self._expect(self._late)
        elif self._in_body and not self.cycle.response_complete:
            self._end_late("body")
        elif self._in_body or not self._unread_bytes:
            self.transport.abort()
        elif not self._answering:  # else the beginning of a next request would end the answer to this one
            self._end_late("head")

    def _end_late(self, what: str) -> None:
        self._refusal = RequestTimeoutError(f"The request's {what} did not come within {self._limits.receive_s:g} s.")
        self.send_400_response("")

    @property
    def _answering(self) -> bool:
        """True if bytes of an answer are on their way, or another's turn comes before that of the last request."""
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and cycle.response_started and not cycle.response_complete)

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
