"""Reads a streamed answer with as little work as possible in Python.

The client of a benchmark shares its cores with the server that it measures, so the server lacks the time that the
client takes: more with a server that writes each choice's token alone (vLLM) than with one that writes a step in one
piece (Motet). An event in a write of its own costs 55 to 100 microseconds with httpx and 13 to 17 here, one in a step
of 32 costs 6 and 2 to 4.

httpx still builds the request, with address, JSON and keys. The answer goes from the socket through httptools, the
parser of the servers themselves, to lines.
"""

import asyncio
from collections.abc import Callable, Mapping

import httptools
import httpx

from motet.errors import EngineError

OnLine = Callable[[str], None]
OK = 200
NEEDED_HEADERS = {"Accept-Encoding": "identity", "Connection": "close"}
"""They ask for an uncompressed answer, and for one request on each connection."""


async def follow(client: httpx.AsyncClient, path: str, body: Mapping[str, object], on_line: OnLine) -> None:
    """Posts `body` and calls `on_line` with each line of the answer as soon as it has arrived.

    Raises what `on_line` raises, `EngineError` if the server refuses, and `OSError` if it cannot be reached or leaves
    before its answer has ended.
    """
    request = client.build_request("POST", path, json=body, headers=NEEDED_HEADERS)
    url = request.url
    port = url.port or (443 if url.scheme == "https" else 80)
    stream = _Stream(on_line)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(lambda: stream, url.host, port, ssl=url.scheme == "https" or None)
    try:
        transport.write(bytes_of(request))
        await stream.ended
    finally:
        transport.close()
    if stream.status != OK:
        raise EngineError(f"{stream.status}: {stream.refusal.decode(errors='replace')}")


def bytes_of(request: httpx.Request) -> bytes:
    """Returns a request as bytes of HTTP/1.1."""
    head = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    head += [b"%b: %b" % (name, value) for name, value in request.headers.raw]
    return b"\r\n".join([*head, b"", request.content])


class Lines:
    """Turns bytes in any pieces into whole lines without line ends; empty lines are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        whole, end, rest = piece.rpartition(b"\n")
        if not end:
            self._rest += piece
            return []
        whole, self._rest = self._rest + whole, rest
        return [line for line in whole.splitlines() if line]


class _Stream(asyncio.Protocol):
    """One answer. `ended` is done when its last byte has come."""

    def __init__(self, on_line: OnLine) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.refusal = b""
        """The body of an answer whose status is not 200."""
        self._on_line = on_line
        self._lines = Lines()
        self._parser = httptools.HttpResponseParser(self)
        self._bodies: list[bytes] = []
        self._complete = False

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._parser.feed_data(data)
            self._take()
        except httptools.HttpParserError as exc:
            self.ended.set_exception(EngineError(f"the server does not speak HTTP: {exc}"))
        except Exception as exc:  # from on_line: for the caller, not for the event loop
            self.ended.set_exception(exc)
        else:
            if self._complete:
                self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the server left before its answer had ended"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_message_complete(self) -> None:
        self._complete = True

    def _take(self) -> None:
        """Passes lines on outside the parser, which would wrap what `on_line` raises."""
        bodies, self._bodies = self._bodies, []
        for body in bodies:
            if self.status != OK:
                self.refusal += body
                continue
            for line in self._lines.feed(body):
                self._on_line(line.decode())
