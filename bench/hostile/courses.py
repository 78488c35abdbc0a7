"""Courses of hostile clients: what they do in several requests, or without reading their answers.

They keep groups by the thousand. They end and extend a group at once. They read streams slowly, or disconnect in each
phase of a stream. They request files outside the page, and send invalid trace headers.

A course gets the address of a server as `host:port`, sends requests over sockets of its own, and returns the statuses
that it received. None of them must be 500, and nothing must be left on the server afterwards.
"""

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.hostile.large_requests import CHAT, COUNT_TOKENS, MESSAGE, MESSAGES, POSTERIORS, body, chat, message, steered
from motet.api.known_groups import MAX_CHOICES

Course = Callable[[str], list[int]]
KEPT = 1500
"""Number of groups that one client requests to keep: more than a server keeps."""
TIMEOUT_S = 60.0
PAUSE_S = 0.5
"""Time for which a slow reader reads nothing."""
SMALL_BYTES = 4096
"""Size of a slow reader's receive buffer."""
STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
ID = re.compile(rb'"id":"([a-z]+-[0-9a-f]+)"')
STREAMED: Mapping[str, tuple[str, bytes]] = {
    "a policy": (CHAT, steered({"stop_when": POSTERIORS, "extract": "last_line"}, max_tokens=200, stream=True)),
    "a policy, one by one": (CHAT, steered({"start": 1}, stream=True)),
    "a policy, step by step": (CHAT, steered({"start": 64, "deterministic": True}, stream=True)),
    "a message": (MESSAGES, message(max_tokens=400, stream=True)),
}
PATHS = (
    *("/page/../page.py", "/page/..%2fpage.py", "/page/%2e%2e/%2e%2e/config.py", "/page/..%5cpage.py"),
    *("/page/....//page.py", "/page//etc/passwd", "/page/%00", "/page/page.js%00.html", "/page/./page.js/"),
    *("//page/page.js", "/page/PAGE.JS", "/page/%c0%ae%c0%ae/page.py", "/page/" + "a/" * 4000, "/../../etc/passwd"),
    "/page/" + "%2e%2e%2f" * 2000 + "etc/passwd",
    *("/v1/groups/../models", "/v1/groups/%2e%2e", "/v1/groups/" + "x" * 20_000, "/v1/messages/../models"),
    *("/v1/groups/%00/choices/%00", "/v1/groups/x/choices/" + "9" * 20_000),
)
"""Paths that name no file of the page and no group."""
TRACES = (
    *("", "00", "-" * 60, "é" * 20, "x" * 15_000, f"00-{'0' * 32}-{'0' * 16}-01", f"00-{'f' * 32}-{'f' * 16}-ff"),
    *(f"ff-{'a' * 32}-{'b' * 16}-01", f"00-{'A' * 32}-{'B' * 16}-01", f"00-{'a' * 31}-{'b' * 16}-01"),
    f"01-{'a' * 32}-{'b' * 16}-01-{'x' * 8000}",
)
STATES = ("a=1", "a=" + "b" * 600, "=,=,=", "a=1," * 400, "é=ü", "k" * 300 + "=v", "A=1,\t,b=2")
"""Values of `tracestate`."""


def request_bytes(method: str, path: str, content: bytes = b"", *, headers: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes of a request after whose answer the server closes the connection."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(content)}"]
    lines += ["content-type: application/json"] if content else []
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


@contextlib.contextmanager
def connected(server: str, *, buffer_bytes: int = 0) -> Iterator[socket.socket]:
    """Yields a connection. It is reset at the end if the server has not closed it before."""
    host, _, port = server.rpartition(":")
    with socket.socket() as connection:
        connection.settimeout(TIMEOUT_S)
        if buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.connect((host, int(port)))
        yield connection


def read(connection: socket.socket, *, enough: re.Pattern[bytes] | None = None) -> bytes:
    """Reads to the end of the connection, or until `enough` is found."""
    received = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(1 << 16):
            received += piece
            if enough is not None and enough.search(received):
                break
    return received


def exchange(server: str, request: bytes) -> bytes:
    """Sends a request on a new connection, and returns the complete answer."""
    with contextlib.suppress(OSError), connected(server) as connection:
        connection.sendall(request)
        return read(connection)
    return b""


def statuses(*answers: bytes) -> list[int]:
    """Returns the statuses of answers. The status is 0 if the connection ended before it."""
    found = [STATUS.match(answer) for answer in answers]
    return [0 if one is None else int(one[1]) for one in found]


def all_at_once(server: str, requests: Sequence[bytes]) -> list[int]:
    with ThreadPoolExecutor(16) as pool:
        return statuses(*pool.map(lambda request: exchange(server, request), requests))


def keep_many(server: str) -> list[int]:
    """Requests more kept groups than a server keeps, and queries the last one repeatedly."""
    request = request_bytes("POST", CHAT, chat(n=1, max_tokens=1, keep_s=3600))
    received = all_at_once(server, [request] * KEPT)
    found = ID.search(exchange(server, request))
    path = "/v1/groups/x" if found is None else f"/v1/groups/{found[1].decode()}"
    queries = [request_bytes("GET", path)] * 50 + [request_bytes("DELETE", path)] * 5
    return received + all_at_once(server, queries)


def query_wide_group(server: str) -> list[int]:
    """Adds choices to a kept group until it has the maximum, and queries it from several connections."""
    answer = exchange(server, request_bytes("POST", CHAT, chat(n=256, max_tokens=1, keep_s=600)))
    found = ID.search(answer)
    if found is None:
        return statuses(answer)
    group = f"/v1/groups/{found[1].decode()}"
    more = [exchange(server, request_bytes("POST", f"{group}/more", b'{"n":256}')) for _ in range(MAX_CHOICES // 256)]
    return statuses(answer, *more) + all_at_once(server, [request_bytes("GET", group)] * 32)


def look_at_many(server: str) -> list[int]:
    """Adds choices to a group until it has thousands, and queries it on many connections."""
    received = exchange(server, request_bytes("POST", CHAT, chat(n=256, max_tokens=1, keep_s=3600)))
    found = ID.search(received)
    if found is None:
        return statuses(received)
    path = f"/v1/groups/{found[1].decode()}"
    more = all_at_once(server, [request_bytes("POST", f"{path}/more", b'{"n":256}')] * 40)
    return more + all_at_once(server, [request_bytes("GET", path)] * 64)


def race(server: str) -> list[int]:
    """Ends every choice of a streaming group several times, ends the group, and requests more choices, all at once."""
    path, content = STREAMED["a policy, step by step"]
    kept = json.dumps(
        json.loads(content) | {"keep_s": 60, "n": 32, "group": {"start": 8, "deterministic": True}}
    ).encode()
    with connected(server) as connection:
        connection.sendall(request_bytes("POST", path, kept))
        beginning = read(connection, enough=ID)
        found = ID.search(beginning)
        if found is None:
            return statuses(beginning)
        group = f"/v1/groups/{found[1].decode()}"
        ends = [request_bytes("DELETE", f"{group}/choices/{index % 33}") for index in range(80)]
        more = [request_bytes("POST", f"{group}/more", body) for body in (b'{"n":8,"stream":true}', b'{"n":99}')]
        queries = [
            request_bytes("GET", group),
            request_bytes("GET", f"{group}-0"),
            request_bytes("DELETE", f"{group}/choices/-1"),
        ]
        requests = [*ends[:40], *more, *queries * 4, request_bytes("DELETE", group), *ends[40:], *more, *queries]
        received = all_at_once(server, requests)
        return statuses(beginning + read(connection)) + received


def read_slowly(server: str) -> list[int]:
    """Reads nothing of a stream for a while, and then disconnects."""

    def slow(path: str, content: bytes) -> bytes:
        with connected(server, buffer_bytes=SMALL_BYTES) as connection:
            connection.sendall(request_bytes("POST", path, content))
            time.sleep(PAUSE_S)
            return connection.recv(SMALL_BYTES)

    with ThreadPoolExecutor(16) as pool:
        return statuses(*pool.map(lambda request: slow(*request), [*STREAMED.values()] * 4))


def disconnect(server: str) -> list[int]:
    """Disconnects in each phase: in the head, in the body, before the first byte, and in the middle of the answer."""
    received = []
    for path, content in STREAMED.values():
        request = request_bytes("POST", path, content)
        for place in (10, len(request) - len(content) // 2, len(request)):
            with connected(server) as connection:
                connection.sendall(request[:place])
        for pieces in (1, 5, 50):
            with connected(server) as connection:
                connection.sendall(request)
                first = connection.recv(4096)
                for _ in range(pieces):
                    connection.recv(512)
            received += statuses(first)
    return received


def request_files(server: str) -> list[int]:
    """Requests files outside the page. An answer with status 200 would have delivered one, and is returned as 500."""
    received = [
        *all_at_once(server, [request_bytes(method, path) for path in PATHS for method in ("GET", "DELETE")]),
        *all_at_once(server, [request_bytes("POST", f"{path}/more", b'{"n":1}') for path in PATHS]),
    ]
    return [500 if status == 200 else status for status in received]


def send_invalid_traces(server: str) -> list[int]:
    """Sends invalid trace headers."""
    heads = [{"traceparent": trace, "tracestate": state} for trace in TRACES for state in STATES]
    rest = (CHAT, chat(n=2, max_tokens=2)), (COUNT_TOKENS, body(messages=[MESSAGE]))
    return all_at_once(
        server, [request_bytes("POST", path, content, headers=head) for head in heads for path, content in rest]
    )


COURSES: Mapping[str, Course] = {
    "groups kept by the thousand": keep_many,
    "wide group, queried": query_wide_group,
    "group of 10,000 choices, queried": look_at_many,
    "group ended and extended at once": race,
    "slow readers": read_slowly,
    "disconnected in each phase": disconnect,
    "files outside the page": request_files,
    "invalid traces": send_invalid_traces,
}
