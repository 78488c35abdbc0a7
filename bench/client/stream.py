"""Reads a streamed answer with as little Python code as possible.

The client of a benchmark shares the cores with the server that it measures, so the client's CPU time is lost to the
server. The loss is larger with a server that sends the token of each choice in a separate write (vLLM) than with a
server that sends all tokens of a step in one write (Motet). An event in a separate write costs 55 to 100 microseconds
with httpx, and 13 to 17 here. An event in a step of 32 costs 6 microseconds with httpx, and 2 to 4 here.

httpx still builds the request: address, JSON and keys. The answer goes from the socket through httptools, the parser
that uvicorn uses too, to lines.
"""

import asyncio
from collections.abc import Callable, Mapping

import httptools
import httpx

from motet.errors import EngineError

OnLine = Callable[[str], None]
OK = 200
COMMENT = b":"
"""Start of a comment in a stream. Comments are skipped: a wait during which the server sends them is one gap."""
NEEDED_HEADERS = {"Accept-Encoding": "identity", "Connection": "close"}
"""Headers that request an uncompressed answer, and a new connection for each request."""


async def follow(client: httpx.AsyncClient, path: str, body: Mapping[str, object], on_line: OnLine) -> None:
    """Posts `body`, and calls `on_line` with each line of the answer as soon as it has arrived.

    Raises any exception of `on_line`, `EngineError` if the server refuses the request, and `OSError` if the server
    cannot be reached or disconnects before the end of its answer.
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
    """Returns the bytes of an HTTP/1.1 request."""
    head = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    head += [b"%b: %b" % (name, value) for name, value in request.headers.raw]
    return b"\r\n".join([*head, b"", request.content])


class LineBuffer:
    """Joins bytes that are cut anywhere into complete lines, without line ends. Empty lines are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        complete, end, rest = piece.rpartition(b"\n")
        if not end:
            self._rest += piece
            return []
        complete, self._rest = self._rest + complete, rest
        return [line for line in complete.splitlines() if line]


class _Stream(asyncio.Protocol):
    """One answer. `ended` is done when the last byte has arrived."""

    def __init__(self, on_line: OnLine) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.refusal = b""
        """Body of an answer whose status is not 200."""
        self._on_line = on_line
        self._lines = LineBuffer()
        self._parser = httptools.HttpResponseParser(self)
        self._bodies: list[bytes] = []
        self._complete = False

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._parser.feed_data(data)
            self._pass_on()
        except httptools.HttpParserError as exc:
            self.ended.set_exception(EngineError(f"the server did not answer in HTTP: {exc}"))
        except Exception as exc:  # raised by on_line: for the caller, not for the event loop
            self.ended.set_exception(exc)
        else:
            if self._complete:
                self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the server disconnected before the end of its answer"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_message_complete(self) -> None:
        self._complete = True

    def _pass_on(self) -> None:
        """Calls `on_line` outside the parser, which would wrap exceptions of `on_line`."""

        bodies, self._bodies = self._bodies, []
        for body in bodies:
            if self.status != OK:
                self.refusal += body
                continue
            for line in self._lines.feed(body):
                if not line.startswith(COMMENT):  # a wait with comments is one gap
                    self._on_line(line.decode())
