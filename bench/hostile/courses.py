"""What hostile clients do in more than one request, or without reading their answer: groups are kept by the thousand,
looked at, ended and asked for more all at once; streams are read slowly or left in each of their phases; the page is
asked for files that are not its own; traces are named wrongly.

A course gets the address of a server, as `host:port`, talks to it over sockets of its own, and returns the statuses
that it was told. None may be a 500, and nothing may be left when it is over.
"""

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.hostile.large_requests import CHAT, COUNT_TOKENS, MESSAGE, MESSAGES, POSTERIORS, body, chat, message, steered

Course = Callable[[str], list[int]]
KEPT = 1500
"""Groups that one client asks to be kept: more than a server keeps."""
TIMEOUT_S = 60.0
PATIENCE_S = 0.5
"""How long a slow reader reads nothing."""
SMALL_BYTES = 4096
"""Of a slow reader's buffer."""
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


def asked(method: str, path: str, content: bytes = b"", *, headers: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes of a request, which asks the server to end the connection after its answer."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(content)}"]
    lines += ["content-type: application/json"] if content else []
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


@contextlib.contextmanager
def connected(server: str, *, buffer_bytes: int = 0) -> Iterator[socket.socket]:
    """Yields a connection. It is reset at the end if the server has not ended it before."""
    host, _, port = server.rpartition(":")
    with socket.socket() as connection:
        connection.settimeout(TIMEOUT_S)
        if buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.connect((host, int(port)))
        yield connection


def read(connection: socket.socket, *, enough: re.Pattern[bytes] | None = None) -> bytes:
    """Reads to the end, or until `enough` is found."""
    told = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(1 << 16):
            told += piece
            if enough is not None and enough.search(told):
                break
    return told


def sent(server: str, request: bytes) -> bytes:
    """Sends a request on a connection of its own; returns the whole answer."""
    with contextlib.suppress(OSError), connected(server) as connection:
        connection.sendall(request)
        return read(connection)
    return b""


def statuses(*answers: bytes) -> list[int]:
    """Returns the statuses of answers; 0 for one that ended before it had any."""
    found = [STATUS.match(answer) for answer in answers]
    return [0 if one is None else int(one[1]) for one in found]


def all_at_once(server: str, requests: Sequence[bytes]) -> list[int]:
    with ThreadPoolExecutor(16) as pool:
        return statuses(*pool.map(lambda request: sent(server, request), requests))


def keep_many(server: str) -> list[int]:
    """Asks for more groups to be kept than a server keeps, and looks at the last one again and again."""
    one = asked("POST", CHAT, chat(n=1, max_tokens=1, keep_s=3600))
    told = all_at_once(server, [one] * KEPT)
    found = ID.search(sent(server, one))
    path = "/v1/groups/x" if found is None else f"/v1/groups/{found[1].decode()}"
    return told + all_at_once(server, [asked("GET", path)] * 50 + [asked("DELETE", path)] * 5)


def race(server: str) -> list[int]:
    """Ends every choice of a group that streams, several times, and the group, and asks for more, all at once."""
    path, content = STREAMED["a policy, step by step"]
    kept = json.dumps(
        json.loads(content) | {"keep_s": 60, "n": 32, "group": {"start": 8, "deterministic": True}}
    ).encode()
    with connected(server) as connection:
        connection.sendall(asked("POST", path, kept))
        begun = read(connection, enough=ID)
        found = ID.search(begun)
        if found is None:
            return statuses(begun)
        group = f"/v1/groups/{found[1].decode()}"
        ends = [asked("DELETE", f"{group}/choices/{index % 33}") for index in range(80)]
        more = [asked("POST", f"{group}/more", b'{"n":8,"stream":true}'), asked("POST", f"{group}/more", b'{"n":99}')]
        looks = [asked("GET", group), asked("GET", f"{group}-0"), asked("DELETE", f"{group}/choices/-1")]
        told = all_at_once(server, [*ends[:40], *more, *looks * 4, asked("DELETE", group), *ends[40:], *more, *looks])
        return statuses(begun + read(connection)) + told


def read_slowly(server: str) -> list[int]:
    """Reads nothing of a stream for a while, and then leaves."""

    def slow(path: str, content: bytes) -> bytes:
        with connected(server, buffer_bytes=SMALL_BYTES) as connection:
            connection.sendall(asked("POST", path, content))
            time.sleep(PATIENCE_S)
            return connection.recv(SMALL_BYTES)

    with ThreadPoolExecutor(16) as pool:
        return statuses(*pool.map(lambda one: slow(*one), [*STREAMED.values()] * 4))


def leave(server: str) -> list[int]:
    """Leaves streams in each phase: in the head, in the body, before the first byte, and in the midst of an answer."""
    told = []
    for path, content in STREAMED.values():
        request = asked("POST", path, content)
        for place in (10, len(request) - len(content) // 2, len(request)):
            with connected(server) as connection:
                connection.sendall(request[:place])
        for pieces in (1, 5, 50):
            with connected(server) as connection:
                connection.sendall(request)
                first = connection.recv(4096)
                for _ in range(pieces):
                    connection.recv(512)
            told += statuses(first)
    return told


def ask_for_files(server: str) -> list[int]:
    """Asks for files beside those of the page. One that is given would be a 200."""
    told = [
        *all_at_once(server, [asked(method, path) for path in PATHS for method in ("GET", "DELETE")]),
        *all_at_once(server, [asked("POST", f"{path}/more", b'{"n":1}') for path in PATHS]),
    ]
    return [500 if status == 200 else status for status in told]


def name_traces_wrongly(server: str) -> list[int]:
    """Sends headers of traces that are none."""
    heads = [{"traceparent": trace, "tracestate": state} for trace in TRACES for state in STATES]
    rest = (CHAT, chat(n=2, max_tokens=2)), (COUNT_TOKENS, body(messages=[MESSAGE]))
    return all_at_once(server, [asked("POST", path, content, headers=head) for head in heads for path, content in rest])


COURSES: Mapping[str, Course] = {
    "groups kept by the thousand": keep_many,
    "ended and asked for more at once": race,
    "slow readers": read_slowly,
    "left in each phase": leave,
    "files beside the page's": ask_for_files,
    "traces that are none": name_traces_wrongly,
}
