"""The request of a line, sent to the application of this server without a socket. Access control, limits, metrics and
the log apply as to any other request with the batch's API key."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from motet.api.http.caller import HEADER
from motet.batch.lines import BatchLine
from motet.engines.refusals import ReplyVerdict, verdict_on

MAX_ANSWER_BYTES = 2**27
"""Maximum size of an answer, which is in memory until it is stored. The rest of a larger one is not kept."""


@dataclass
class LineAnswer:
    """The response to a line's request."""

    status: int = 0
    """0 until the response has started."""
    request_id: str = ""
    pieces: list[bytes] = field(default_factory=list)
    """The body. Empty if it is too large."""
    num_bytes: int = 0
    """Size of the body."""
    complete: bool = False

    @property
    def too_large(self) -> bool:
        return self.num_bytes > MAX_ANSWER_BYTES

    @property
    def verdict(self) -> ReplyVerdict:
        body = b"".join(self.pieces) if self.status >= 300 else b""
        return verdict_on(self.status, body, repeat_faults=False)

    def add(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        if self.too_large:
            self.pieces.clear()
        else:
            self.pieces.append(piece)


async def call_line(app: ASGIApp, line: BatchLine, *, key: str, stop: asyncio.Event) -> LineAnswer:
    """Sends the request with an API key; empty for none. After `stop` the application sees that the client has left,
    and the answer can be incomplete."""
    answer, is_sent = LineAnswer(), False

    async def receive() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": line.body, "more_body": False}
        await stop.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.request_id = Headers(raw=list(message["headers"])).get(HEADER, "")
        elif message["type"] == "http.response.body":
            answer.add(bytes(message.get("body", b"")))
            answer.complete = not message.get("more_body", False)

    await app(_scope(line, key), receive, send)
    return answer


def _scope(line: BatchLine, key: str) -> dict[str, Any]:
    sent = [(b"content-type", b"application/json"), (b"content-length", str(len(line.body)).encode())]
    if key:
        sent.append((b"authorization", f"Bearer {key}".encode("latin-1")))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": sent,
        "client": None,
        "server": None,
        "state": {"batch": True},
    }
