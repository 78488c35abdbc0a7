"""A load client with little CPU time of its own: plain sockets, prepared requests, events counted but not parsed."""

import json
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPT = "What is a motet?"
NAP_S = 0.002
"""Default pause between two reads of clients that do not wait for each token."""

EVENT = b"data: "
CARRY = len(EVENT) - 1
"""Number of bytes of the last read that are searched again, because an event can start in one read and end in the
next."""
END_OF_CHUNKS = b"0\r\n\r\n"
LENGTH = b"\r\ncontent-length: "
READ_BYTES = 1 << 18


def request_bytes(path: str, fields: Mapping[str, object]) -> bytes:
    """Returns a complete request as bytes of HTTP/1.1."""
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Received:
    """Totals of all clients' answers from one server."""

    wall_s: float = 0.0
    events: int = 0
    first_s: list[float] = field(default_factory=list)
    """Time from each request to its first event, or to the beginning of an answer without events."""
    reads_s: list[list[float]] = field(default_factory=list)
    """Moments at which the parts of each answer arrived, from the head on."""


@dataclass(frozen=True)
class LoadCase:
    """A load: each of `clients` clients sends a request for n choices of `max_tokens` tokens, `requests` times."""

    route: str
    n: int
    clients: int
    max_tokens: int
    requests: int
    stream: bool = True
    nap_s: float = 0.0
    """Pause between two reads of the clients; 0 to read each part as soon as it arrives."""

    @property
    def tokens(self) -> int:
        return self.n * self.clients * self.max_tokens * self.requests

    @property
    def request(self) -> bytes:
        fields: dict[str, object] = {"n": self.n, "max_tokens": self.max_tokens, "ignore_eos": True, "seed": 1}
        if self.route == "chat":
            fields["messages"] = [{"role": "user", "content": PROMPT}]
        else:
            fields["prompt"] = PROMPT
        return request_bytes(ROUTES[self.route], fields | {"stream": self.stream})

    def check(self, received: Received) -> None:
        """Raises AssertionError unless every token came in a separate event (the text is plain English)."""
        others = 1 + (self.n if self.route == "chat" else 0)  # [DONE], and in chats the roles
        expected = self.tokens + self.clients * self.requests * others if self.stream else 0
        if received.events != expected:
            raise AssertionError(f"{self}: {received.events} events came, not {expected}")


class RawClients:
    """A number of connections to one server, which stay open from load to load.

    With `nap_s`, the clients read the arrived data once in this time. A client that waits for each token is woken by
    the kernel at the expense of the server's CPU time; a client on another machine would cost the server nothing."""

    def __init__(self, url: str, count: int, *, nap_s: float = 0.0) -> None:
        address = urlsplit(url)
        self._nap_s = nap_s
        self._selector = selectors.DefaultSelector()
        self._connections = [_Connection(address.hostname or "", address.port or 0) for _ in range(count)]
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def __enter__(self) -> "RawClients":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for connection in self._connections:
            connection.socket.close()

    def load(self, request: bytes, *, requests: int) -> Received:
        """Sends the request `requests` times over every connection, each time after the last answer has ended."""
        received, started_s = Received(), time.perf_counter()
        left = dict.fromkeys(self._connections, requests - 1)
        for connection in self._connections:
            connection.send(request)
        while left:
            if self._nap_s:
                time.sleep(self._nap_s)
            for key, _ in self._selector.select():
                connection = key.data
                if not connection.read(received):
                    continue
                if left[connection]:
                    left[connection] -= 1
                    connection.send(request)
                else:
                    del left[connection]
        received.wall_s = time.perf_counter() - started_s
        return received


class _Connection:
    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent_s = 0.0
        self._has_first = False
        self._reads_s: list[float] = []
        self._bytes_left: int | None = None
        """Number of missing bytes of an answer with a content-length. None if the answer comes in chunks."""
        self._tail = b""

    def send(self, request: bytes) -> None:
        self._has_first, self._reads_s, self._bytes_left, self._tail = False, [], None, b""
        self._sent_s = time.perf_counter()
        self.socket.sendall(request)

    def read(self, received: Received) -> bool:
        """Reads the arrived data, and returns True if the answer has ended."""
        new = self.socket.recv(READ_BYTES)
        now_s = time.perf_counter()
        if not new:
            raise ConnectionError("the server closed a connection")
        if not self._reads_s:
            self._read_head(new)
            received.reads_s.append(self._reads_s)
        self._reads_s.append(now_s)
        data = self._tail + new
        events = data.count(EVENT)
        if not self._has_first and (events or self._bytes_left is not None):
            self._has_first = True
            received.first_s.append(now_s - self._sent_s)
        received.events += events
        self._tail = data[-CARRY:]
        if self._bytes_left is None:
            return data.endswith(END_OF_CHUNKS)
        self._bytes_left -= len(new)
        return self._bytes_left == 0

    def _read_head(self, data: bytes) -> None:
        """Parses the head of the answer. The first read has all of it, because servers send it in one piece."""
        head, separator, _ = data.partition(b"\r\n\r\n")
        if not separator or not head.startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(f"no answer with status 200: {data!r}")
        _, has_length, length = head.partition(LENGTH)
        if has_length:
            self._bytes_left = len(head) + len(separator) + int(length.split(b"\r\n")[0])
