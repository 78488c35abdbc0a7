"""TLS handshakes of clients, within the limits on connections, and with their computations in a thread.

1. a new connection is counted like any other: it has `receive_s`, and can be closed when others need its place
2. each message of the handshake is handled in the one thread of the server for handshakes, since a signature takes a
   millisecond and more: hundreds of clients that connect at once must not stop the streams of the others
3. after the handshake, a `TlsTransport` and the connection's protocol take over"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from uvicorn.server import ServerState

from motet.api.http.failure import error_json
from motet.deploy.connection import ConnectionLimits
from motet.deploy.tls.certificates import Certificates
from motet.deploy.tls.session import TlsSession
from motet.deploy.tls.transport import TlsTransport
from motet.errors import RequestError

log = logging.getLogger(__name__)

HANDSHAKE_RECORD = 22
"""First byte of every TLS connection."""
MAX_HANDSHAKE_BYTES = 256 * 1024
"""Maximum number of bytes of an incomplete handshake. OpenSSL accepts chains of certificates of up to 100 KiB."""
PLAIN_HTTP = "This port accepts only HTTPS: use a URL that starts with https://."


class Handshakes:
    """The handshakes of one server."""

    def __init__(
        self, certificates: Certificates, limits: ConnectionLimits, *, make: Callable[..., asyncio.Protocol]
    ) -> None:
        """`make`: makes the protocol of a connection after its handshake, from uvicorn's arguments."""
        self._certificates = certificates
        self._make = make
        self.limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tls-handshakes")

    def connection(self, **uvicorn_arguments: Any) -> "TlsHandshake":
        """Returns the protocol of a new connection."""
        make = partial(self._make, **uvicorn_arguments)
        return TlsHandshake(self, make=make, state=uvicorn_arguments["server_state"])

    def new_session(self) -> TlsSession:
        """Returns a session with the present certificates."""
        assert self._certificates.for_clients is not None
        return TlsSession(self._certificates.for_clients)

    def run(self, work: Callable[[], bool]) -> "asyncio.Future[bool]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class TlsHandshake(asyncio.Protocol):
    """One connection until its handshake is complete."""

    def __init__(self, handshakes: Handshakes, *, make: Callable[[], asyncio.Protocol], state: ServerState) -> None:
        self.transport: asyncio.Transport
        self._handshakes = handshakes
        self._make = make
        self._state = state
        self._session: TlsSession | None = None
        self._num_received = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._connections.add(self)
        limits, loop = self._handshakes.limits, asyncio.get_running_loop()
        if limits.admit(self, self._connections, now_s=loop.time()):
            self._deadline = loop.call_later(limits.receive_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def displace(self) -> None:
        self._leave()
        self.transport.abort()

    def shutdown(self) -> None:
        """Called when the server ends."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._session is None:
            if data[0] != HANDSHAKE_RECORD:
                self._refuse_plain_http()
                return
            self._session = self._handshakes.new_session()
        self._num_received += len(data)
        self.transport.pause_reading()
        step = self._handshakes.run(partial(self._step, self._session, data))
        step.add_done_callback(partial(self._handle, self._session))

    @property
    def _connections(self) -> set[Any]:
        return self._state.connections

    def _step(self, session: TlsSession, data: bytes) -> bool:
        """Called in the thread: does nothing for a connection that was closed while it waited."""
        return not self.transport.is_closing() and session.handshake(data)

    def _handle(self, session: TlsSession, step: "asyncio.Future[bool]") -> None:
        if step.cancelled() or self.transport.is_closing():
            return
        if message := session.unsent():
            self.transport.write(message)
        if (error := step.exception()) is not None:
            if not isinstance(error, ssl.SSLError):
                raise error
            log.debug("a client's TLS handshake failed: %s", error.reason)
            self.transport.close()
        elif step.result():
            self._leave()
            TlsTransport(self.transport, session, protocol=self._make()).start()
        elif self._num_received > MAX_HANDSHAKE_BYTES:
            self.transport.abort()
        else:
            self.transport.resume_reading()

    def _refuse_plain_http(self) -> None:
        body = error_json(RequestError(PLAIN_HTTP, code="https_required"))
        head = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    def _leave(self) -> None:
        self._connections.discard(self)
        self._handshakes.limits.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
