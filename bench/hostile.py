"""Measures what hostile clients with a key cost a neighbour: large bodies of all kinds, sent again and again.

A server with an engine that takes a step every 10 ms runs in a process of its own. A neighbour streams from it, first
alone, then beside clients that send the bodies of `CASES` in turn. "lag" is how late a task of the server's event loop
wakes that sleeps for a millisecond; "step" is the mean time between two tokens of the neighbour. Prints a table, the
goals, and JSON on the last line.

Run: python -m bench.hostile [--clients 4] [--seconds 10]
"""

import argparse
import asyncio
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import httpx
import uvloop

from bench.frontend_server import serve
from bench.report import Floor, machine, table, tell

CHAT, GENERATE, RESPONSES = "/v1/chat/completions", "/inference/v1/generate", "/v1/responses"
CALLS = [{"type": "function", "function": {"name": "f"}}]
MESSAGE = {"role": "user", "content": "x"}


def padded(first: str, piece: str, *, last: str, size: int = 7 * 2**20) -> bytes:
    """Returns a body of about `size` bytes, a little less than a server takes."""
    return (first + piece * (size // len(piece)) + last).encode()


CASES: Mapping[str, tuple[str, bytes, str | None]] = {
    "empty messages": (CHAT, padded('{"messages":[', "{},", last="{}]}"), "messages"),
    "messages": (CHAT, padded('{"messages":[', json.dumps(MESSAGE) + ",", last="{}]}"), "messages"),
    "tool calls": (
        CHAT,
        padded('{"messages":[{"role":"assistant","tool_calls":[', json.dumps(CALLS[0]) + ",", last="{}]}]}"),
        "messages",
    ),
    "text parts": (
        CHAT,
        padded('{"messages":[{"role":"user","content":[', '{"type":"text","text":"x"},', last="{}]}]}"),
        "messages",
    ),
    "unknown keys": (CHAT, ("{" + ",".join(f'"k{number}":1' for number in range(500_000)) + "}").encode(), "k40000"),
    "some unknown keys": (CHAT, ("{" + ",".join(f'"k{number}":1' for number in range(9000)) + "}").encode(), "k0"),
    "metadata": (
        CHAT,
        json.dumps({"messages": [MESSAGE], "metadata": {f"k{number}": "x" for number in range(400_000)}}).encode(),
        "metadata",
    ),
    "empty arrays": (CHAT, padded('{"messages":[', "[],", last="[]]}"), "messages"),
    "depth": (CHAT, b'{"messages":' + b"[" * 7_000_000, "messages"),
    "items": (RESPONSES, padded('{"input":[', json.dumps(MESSAGE) + ",", last="{}]}"), "input"),
    "unknown roles": (CHAT, padded('{"messages":["', 'x","', last='"]}', size=300_000), "messages[0]"),
    "included": (RESPONSES, padded('{"input":"x","include":["', 'x","', last='"]}', size=300_000), "include[0]"),
    "words for tokens": (
        GENERATE,
        padded('{"sampling_params":{},"token_ids":["', 'x","', last='"]}', size=300_000),
        "token_ids[0]",
    ),
    "strings": (GENERATE, padded('{"sampling_params":{},"token_ids":["', 'x","', last='"]}'), "token_ids"),
    "values": (GENERATE, padded('{"sampling_params":{},"token_ids":[', "1,", last="1]}"), "token_ids"),
    "long stop string": (
        CHAT,
        padded('{"messages":[{"role":"user","content":"x"}],"stop":["', "x", last='"]}'),
        "stop",
    ),
    "stop tokens": (
        CHAT,
        padded('{"messages":[{"role":"user","content":"x"}],"stop_token_ids":[', "1,", last="1]}"),
        "stop_token_ids",
    ),
    "biases": (
        CHAT,
        json.dumps({"messages": [MESSAGE], "logit_bias": {str(number): 1 for number in range(30_000)}}).encode(),
        "logit_bias",
    ),
    "no JSON": (CHAT, padded("", "[1,", last=""), None),
}
"""What is sent by its name: route, body, and the field that its refusal names."""

STEP_S = 0.01
MOST_LAG_MS = 50.0
MOST_STEP_RATIO = 1.2
TOLD_AT_ONCE = 100


@dataclass(frozen=True)
class Share:
    """What a neighbour got in one stretch of time."""

    lag_p50_ms: float
    lag_p999_ms: float
    lag_max_ms: float
    step_ms: float


async def serve_watched() -> None:
    """Serves, and prints when the loop woke, and how late it was: both in seconds."""

    async def watch() -> None:
        lags: list[tuple[float, float]] = []
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            woke = time.monotonic()
            lags.append((woke, woke - began - 0.001))
            if len(lags) == TOLD_AT_ONCE:
                print(json.dumps(lags), flush=True)
                lags.clear()

    watching = asyncio.create_task(watch())
    await serve("motet", burst=1, rest_s=STEP_S)
    watching.cancel()


def attack(url: str, *, clients: int) -> None:
    """Sends all cases again and again, until its standard input ends, as it does with its parent."""

    def send(first: int) -> None:
        for path, body, _ in itertools.islice(itertools.cycle(CASES.values()), first, None):
            connection = http.client.HTTPConnection(urlsplit(url).netloc)
            try:
                connection.request("POST", path, body, {"content-type": "application/json"})
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):  # a body that is refused before its end
                pass
            finally:
                connection.close()

    for number in range(clients):
        threading.Thread(target=send, args=(number * len(CASES) // clients,), daemon=True).start()
    sys.stdin.read()


@contextmanager
def running(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "bench.hostile", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def share(url: str, lags: Sequence[tuple[float, float]], *, seconds: float) -> Share:
    """Streams for at least so long. `lags` are added by another thread."""
    body = {"messages": [MESSAGE], "max_tokens": 400, "stream": True}
    steps, began = 0, time.monotonic()
    while time.monotonic() < began + seconds:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
            response.raise_for_status()
            steps += sum(line.startswith("data: ") for line in response.iter_lines())
    ended = time.monotonic()
    late_ms = sorted(1000 * lag for woke, lag in list(lags) if began < woke <= ended)
    p50, p999 = (late_ms[int(part * len(late_ms))] for part in (0.5, 0.999))
    return Share(p50, p999, late_ms[-1], 1000 * (ended - began) / steps)


def collect(lines: Iterable[str], lags: list[tuple[float, float]]) -> None:
    for line in lines:
        if line.startswith("["):
            lags += json.loads(line)


def measure(*, clients: int, seconds: float) -> dict[str, Share]:
    with running("--serve") as server:
        assert server.stdout is not None  # it is a pipe
        lines = iter(server.stdout)
        url = next(line.strip() for line in lines if line.startswith("http"))
        lags: list[tuple[float, float]] = []
        reading = threading.Thread(target=collect, args=(lines, lags))
        reading.start()
        alone = share(url, lags, seconds=seconds)
        with running("--attack", url, "--clients", str(clients)):
            beside = share(url, lags, seconds=seconds)
    reading.join()
    return {"alone": alone, "beside hostile clients": beside}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4, help="hostile clients")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--check", action="store_true", help="fail when a goal is missed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        uvloop.run(serve_watched())
        return 0
    if arguments.attack:
        attack(arguments.attack, clients=arguments.clients)
        return 0
    found = measure(clients=arguments.clients, seconds=arguments.seconds)
    alone, beside = found.values()
    columns = [("neighbour", "<"), *((name, ".2f") for name in ("lag p50 ms", "p99.9", "max", "step ms"))]
    goals = [
        Floor("lag at p99.9 beside hostile clients, ms", beside.lag_p999_ms, MOST_LAG_MS),
        Floor("step beside hostile clients, of alone", beside.step_ms / alone.step_ms, MOST_STEP_RATIO),
    ]
    rows = [(name, *asdict(one).values()) for name, one in found.items()]
    record = {name: asdict(one) for name, one in found.items()}
    return tell(record, table(columns, rows), about=machine(), floors=goals, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
