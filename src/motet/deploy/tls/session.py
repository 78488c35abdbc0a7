"""TLS of one connection without I/O: takes the bytes that were received, and returns the bytes to send."""

import contextlib
import ssl

MAX_READ_BYTES = 64 * 1024


class TlsSession:
    """The server's side of one TLS connection."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ssl_object = context.wrap_bio(self._received, self._unsent, server_side=True)

    @property
    def context(self) -> ssl.SSLContext:
        return self.ssl_object.context

    @property
    def lacks_certificate(self) -> bool:
        """True if clients need a certificate and this client has shown none. Another certificate ends the handshake."""
        return self.context.verify_mode is not ssl.CERT_NONE and not self.ssl_object.getpeercert()

    def handshake(self, received: bytes) -> bool:
        """Continues the handshake, and returns True when it is complete. Can take several milliseconds, and can be
        called in a thread. Raises ssl.SSLError; `unsent` then has an alert for the client."""
        self._received.write(received)
        try:
            self.ssl_object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def receive(self, received: bytes) -> None:
        self._received.write(received)

    def read(self) -> bytes | None:
        """Returns decrypted bytes; an empty string if the client has ended the connection, None if more bytes must be
        received first. Raises ssl.SSLError."""
        try:
            return self.ssl_object.read(MAX_READ_BYTES)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            return b""

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """Returns the bytes to send for `data`."""
        self.ssl_object.write(data)
        return self.unsent()

    def end(self) -> bytes:
        """Returns the message with which the server ends the connection; it does not wait for the client's."""
        with contextlib.suppress(ssl.SSLError):  # the client has not ended the connection yet, or has sent more data
            self.ssl_object.unwrap()
        return self.unsent()

    def unsent(self) -> bytes:
        """Returns the bytes that the protocol itself must send: a part of the handshake, an alert, a new key."""
        return self._unsent.read()
