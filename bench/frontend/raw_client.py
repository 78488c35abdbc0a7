"""A load client that costs little itself: plain sockets, ready-made requests, events counted and not parsed."""

import json
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

EVENT = b"data: "
CARRY = len(EVENT) - 1
"""Bytes of the last read that are searched again, because an event may begin in one read and end in the next."""
END_OF_CHUNKS = b"0\r\n\r\n"
LENGTH = b"\r\ncontent-length: "
READ_BYTES = 1 << 18


def request_bytes(path: str, fields: Mapping[str, object]) -> bytes:
    """Returns a whole request as bytes of HTTP/1.1."""
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Taken:
    """What all clients together received from a server."""

    wall_s: float = 0.0
    events: int = 0
    first_s: list[float] = field(default_factory=list)
    """For each request, the time until its first event, or until the beginning of an answer without events."""
    reads_s: list[list[float]] = field(default_factory=list)
    """For each request, the moments at which the parts of its answer came, from the head on."""


class Clients:
    """`count` connections to one server, which stay open from load to load.

    With `nap_s` they read what has come every so many seconds. A client that waits for each token is woken by the
    kernel at the cost of whoever sends it; a client on another machine costs the server nothing."""

    def __init__(self, url: str, count: int, *, nap_s: float = 0.0) -> None:
        address = urlsplit(url)
        self._nap_s = nap_s
        self._selector = selectors.DefaultSelector()
        self._connections = [_Connection(address.hostname or "", address.port or 0) for _ in range(count)]
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for connection in self._connections:
            connection.socket.close()

    def load(self, request: bytes, *, requests: int) -> Taken:
        """Sends the request `requests` times over every connection, each time after the last answer has ended."""
        taken, started_s = Taken(), time.perf_counter()
        left = dict.fromkeys(self._connections, requests - 1)
        for connection in self._connections:
            connection.send(request)
        while left:
            if self._nap_s:
                time.sleep(self._nap_s)
            for key, _ in self._selector.select():
                connection = key.data
                if not connection.read(taken):
                    continue
                if left[connection]:
                    left[connection] -= 1
                    connection.send(request)
                else:
                    del left[connection]
        taken.wall_s = time.perf_counter() - started_s
        return taken


class _Connection:
    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent_s = 0.0
        self._told_first = False
        self._reads_s: list[float] = []
        self._bytes_left: int | None = None
        """Bytes missing from an answer with a content-length; None if it comes in chunks."""
        self._tail = b""

    def send(self, request: bytes) -> None:
        self._told_first, self._reads_s, self._bytes_left, self._tail = False, [], None, b""
        self._sent_s = time.perf_counter()
        self.socket.sendall(request)

    def read(self, taken: Taken) -> bool:
        """Reads what has arrived, and returns True if the answer has ended."""
        new = self.socket.recv(READ_BYTES)
        now_s = time.perf_counter()
        if not new:
            raise ConnectionError("the server closed a connection")
        if not self._reads_s:
            self._begin(new)
            taken.reads_s.append(self._reads_s)
        self._reads_s.append(now_s)
        data = self._tail + new
        events = data.count(EVENT)
        if not self._told_first and (events or self._bytes_left is not None):
            self._told_first = True
            taken.first_s.append(now_s - self._sent_s)
        taken.events += events
        self._tail = data[-CARRY:]
        if self._bytes_left is None:
            return data.endswith(END_OF_CHUNKS)
        self._bytes_left -= len(new)
        return self._bytes_left == 0

    def _begin(self, data: bytes) -> None:
        """Reads the head, which is whole in the first read, because servers write it in one piece."""
        head, separator, _ = data.partition(b"\r\n\r\n")
        if not separator or not head.startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(f"no answer: {data!r}")
        _, told, length = head.partition(LENGTH)
        if told:
            self._bytes_left = len(head) + len(separator) + int(length.split(b"\r\n")[0])
