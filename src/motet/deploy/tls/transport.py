"""The transport of a TLS connection after its handshake, between a connection's protocol and its socket's transport.

    client's bytes --> socket's transport --data_received--> TlsTransport --data_received--> protocol
    protocol --write--> TlsTransport --write--> socket's transport --> client

asyncio and uvloop have such transports, but do the handshake of each connection on the event loop, and only then create
the protocol which could limit the number of connections."""

import asyncio
import logging
import ssl
from collections import deque
from enum import Enum, auto
from typing import Any

from motet.deploy.tls.session import TlsSession

log = logging.getLogger(__name__)

MAX_RECORDS_BYTES = 64 * 1024
"""Maximum number of bytes that are encrypted before the socket's transport says whether it accepts more."""
MAX_UNREAD_REPLIES = 256 * 1024
"""Maximum number of unsent bytes when the client makes TLS itself reply, as each change of keys does. A client that
reads nothing could otherwise fill the memory with such replies."""


class _End(Enum):
    """The end of the server's side."""

    OPEN = auto()
    EOF = auto()
    """After the unsent data, the client is informed that no more follows; its own data is discarded."""
    CLOSE = auto()
    """After the unsent data, the connection is closed."""


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """Encrypts and decrypts the data of one protocol."""

    def __init__(self, socket_transport: asyncio.Transport, session: TlsSession, *, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._socket = socket_transport
        self._session = session
        self._protocol = protocol
        self._unencrypted: deque[memoryview] = deque()
        self._writes = True
        """False while the socket's transport accepts no data."""
        self._reads = True
        """False while the protocol accepts no data."""
        self._end = _End.OPEN
        self._end_is_sent = False

    def start(self) -> None:
        """Connects the protocol, and gives it the data that came with the end of the handshake."""
        self._socket.set_protocol(self)
        self._protocol.connection_made(self)
        self._read()
        if self._reads and not self._socket.is_closing():
            self._socket.resume_reading()

    # The side of the protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Returns information about the connection, with `lacks_certificate` of the session."""
        match name:
            case "sslcontext":
                return self._session.context
            case "ssl_object":
                return self._session.ssl_object
            case "lacks_certificate":
                return self._session.lacks_certificate
        return self._socket.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and self._end is _End.OPEN and not self._socket.is_closing():
            self._unencrypted.append(memoryview(data))
            self._send()

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._finish(_End.EOF)

    def close(self) -> None:
        self._finish(_End.CLOSE)

    def abort(self) -> None:
        self._unencrypted.clear()
        self._socket.abort()

    def is_closing(self) -> bool:
        return self._end is _End.CLOSE or self._socket.is_closing()

    def is_reading(self) -> bool:
        return self._reads

    def get_write_buffer_size(self) -> int:
        return self._socket.get_write_buffer_size() + sum(len(data) for data in self._unencrypted)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def pause_reading(self) -> None:
        self._reads = False
        if not self._socket.is_closing():
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        if self._reads:
            return
        self._reads = True
        # The protocol must not receive data during its own call.
        asyncio.get_running_loop().call_soon(self._read_on)

    # The side of the socket's transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._unencrypted.clear()
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received() if self._end is _End.OPEN else None

    def pause_writing(self) -> None:
        self._writes = False
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._writes = True
        self._send()
        if self._writes:
            self._protocol.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._end is _End.OPEN:
            self._session.receive(data)
            self._read()

    def _read_on(self) -> None:
        if self._reads and not self._socket.is_closing():
            self._read()
        if self._reads and not self._socket.is_closing():
            self._socket.resume_reading()

    def _read(self) -> None:
        """Gives the protocol all data that was received, until the protocol pauses reading."""
        try:
            while self._reads and self._end is _End.OPEN and (data := self._session.read()) is not None:
                if not data:
                    if not self._protocol.eof_received():
                        self.close()
                    return
                self._protocol.data_received(data)
        except ssl.SSLError as error:
            log.debug("a client's connection ends: %s", error.reason)
            self._socket.write(self._session.unsent())
            self._socket.close()
            return
        if reply := self._session.unsent():
            self._socket.write(reply)
            if self._socket.get_write_buffer_size() > MAX_UNREAD_REPLIES:
                self.abort()

    def _finish(self, end: _End) -> None:
        if self._end is not _End.CLOSE and not self._socket.is_closing():
            self._end = end
            self._send()

    def _send(self) -> None:
        """Encrypts and sends as much as the socket's transport accepts, then the end."""
        while self._unencrypted and self._writes:
            data = self._unencrypted.popleft()
            if len(data) > MAX_RECORDS_BYTES:
                self._unencrypted.appendleft(data[MAX_RECORDS_BYTES:])
            self._socket.write(self._session.encrypt(data[:MAX_RECORDS_BYTES]))
        if self._unencrypted or self._end is _End.OPEN:
            return
        if not self._end_is_sent:
            self._end_is_sent = True
            self._socket.write(self._session.end())
            if self._end is _End.EOF:
                self._socket.write_eof()
        if self._end is _End.CLOSE:
            self._socket.close()
