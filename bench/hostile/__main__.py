"""Measures what hostile clients with a key cost a neighbour: large requests of all kinds, sent again and again.

A server with an engine that takes a step every 10 ms runs in a process of its own. A neighbour streams from it, first
alone, then beside clients that send the requests of `bench.hostile.large_requests` and do what is in
`bench.hostile.courses`, in turn. "lag" is how late a task of the server's event loop wakes that sleeps for a
millisecond, as far as the server itself is to blame; "step" is the mean time between two tokens of the neighbour.
Nothing may be answered with a 500, and when the hostile clients are gone, no choice and no task of theirs may be left.
Prints a table, the goals, and JSON on the last line.

With `--each`, every request is sent alone, three times, and every course once. Its lag is the greatest while it was
answered, and of the three times the least, since other work on the machine can only add to it.

Run: python -m bench.hostile [--clients 4] [--seconds 10] [--each]
"""

import argparse
import asyncio
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from urllib.parse import urlsplit

import httpx
import uvloop

from bench.frontend.measured_server import serve
from bench.hostile.courses import COURSES
from bench.hostile.large_requests import ANSWERED, MESSAGE, REFUSED
from bench.results.report import Floor, machine, table, tell

JSON = {"content-type": "application/json"}
NICENESS = 10
"""Of the hostile clients, which have machines of their own in life: making and sending requests is no work of the
server's."""
STEP_S = 0.01
MOST_LAG_MS = 50.0
MOST_STEP_RATIO = 1.2
TOLD_AT_ONCE = 100
SETTLE_S = 30.0
SPARE_TASKS = 3
"""Tasks more than before that may be there: the measuring client's own connection has some."""
TASKS = re.compile(r"(?m)^motet:event_loop_tasks (.*)$")
FAILED = re.compile(r'(?m)^motet:http_requests_total\{.*status="500".*\} (.*)$')


@dataclass(frozen=True)
class Share:
    """What a neighbour got in one stretch of time."""

    lag_p50_ms: float
    lag_p999_ms: float
    lag_max_ms: float
    step_ms: float


@dataclass(frozen=True)
class Aftermath:
    """What hostile clients have left."""

    failures: int
    """Answers with the status 500."""
    choices: int
    """Choices that still are written, or wait."""
    tasks: int
    """Tasks of the event loop, more than before."""


async def watching(serving: Coroutine[None, None, None]) -> None:
    """Runs a server, and prints when the loop woke, and how late it was, both in seconds; at most for as long as the
    process worked meanwhile, since a neighbour on the machine may hold it up too."""

    async def watch() -> None:
        lags: list[tuple[float, float]] = []
        while True:
            began, worked = time.monotonic(), time.process_time()
            await asyncio.sleep(0.001)
            woke = time.monotonic()
            lags.append((woke, min(woke - began - 0.001, time.process_time() - worked)))
            if len(lags) == TOLD_AT_ONCE:
                print(json.dumps(lags), flush=True)
                lags.clear()

    watched = asyncio.create_task(watch())
    await serving
    watched.cancel()


def requests_by_name() -> dict[str, tuple[str, bytes]]:
    refused = {name: (path, make()) for name, (path, make, _) in REFUSED.items()}
    return refused | {name: (path, make()) for name, (path, make) in ANSWERED.items()}


def send(server: str, path: str, content: bytes) -> int:
    """Returns the status of the answer; 0 if there is none, as for a body that is refused before its end."""
    connection = http.client.HTTPConnection(server)
    try:
        connection.request("POST", path, content, JSON)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def acts(url: str) -> dict[str, Callable[[], list[int]]]:
    """Returns all requests and courses, by their names. Each returns the statuses that it was told."""
    server = urlsplit(url).netloc

    def sending(path: str, content: bytes) -> list[int]:
        return [send(server, path, content)]

    each: dict[str, Callable[[], list[int]]] = {
        name: partial(sending, path, content) for name, (path, content) in requests_by_name().items()
    }
    return each | {name: partial(course, server) for name, course in COURSES.items()}


def attack(url: str, *, clients: int) -> None:
    """Does all of it again and again, until its standard input ends, as it does with its parent."""
    every = list(acts(url).values())
    os.nice(NICENESS)

    def go_on(first: int) -> None:
        for act in itertools.islice(itertools.cycle(every), first, None):
            with suppress(OSError):
                act()

    for number in range(clients):
        threading.Thread(target=go_on, args=(number * len(every) // clients,), daemon=True).start()
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


@contextmanager
def watched() -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Runs a server, and yields its URL and the lags of its loop, to which a thread adds."""
    with running("--serve") as server:
        assert server.stdout is not None  # it is a pipe
        lines = iter(server.stdout)
        url = next(line.strip() for line in lines if line.startswith("http"))
        lags: list[tuple[float, float]] = []
        reading = threading.Thread(target=collect, args=(lines, lags))
        reading.start()
        yield url, lags
    reading.join()


def tasks_and_failures(url: str) -> tuple[int, int]:
    told = httpx.get(f"{url}/metrics").text
    return int(float(TASKS.findall(told)[0])), int(sum(map(float, FAILED.findall(told))))


def aftermath(url: str, *, tasks_before: int) -> Aftermath:
    """Waits for a while until nothing is left, and returns what is."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        (worker,) = httpx.get(f"{url}/status").json()["workers"]
        tasks, failures = tasks_and_failures(url)
        left = Aftermath(failures, worker["choices_running"] + worker["choices_waiting"], tasks - tasks_before)
        if (left.choices == 0 and left.tasks <= SPARE_TASKS) or time.monotonic() > deadline_s:
            return left
        time.sleep(0.5)


def measure(*, clients: int, seconds: float) -> tuple[dict[str, Share], Aftermath]:
    with watched() as (url, lags):
        alone = share(url, lags, seconds=seconds)
        tasks_before, _ = tasks_and_failures(url)
        with running("--attack", url, "--clients", str(clients)):
            beside = share(url, lags, seconds=seconds)
        left = aftermath(url, tasks_before=tasks_before)
    return {"alone": alone, "beside hostile clients": beside}, left


def lag_of_each() -> list[tuple[str, int, float]]:
    """Returns the name, the greatest status and the lag in milliseconds of each act, the greatest lag first."""
    found = []
    with watched() as (url, lags):
        for name, act in acts(url).items():
            greatest, told = [], [0]
            for _ in range(1 if name in COURSES else 3):
                began = time.monotonic()
                told += act()
                ended = time.monotonic()
                while not lags or lags[-1][0] < ended:  # they come in pieces
                    time.sleep(0.01)
                greatest.append(1000 * max(lag for woke, lag in list(lags) if began < woke <= ended + 0.05))
            found.append((name, max(told), min(greatest)))
    return sorted(found, key=lambda row: -row[2])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4, help="hostile clients")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--check", action="store_true", help="fail when a goal is missed")
    parser.add_argument("--each", action="store_true", help="send every request alone, and tell the lag of each")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        uvloop.run(watching(serve("motet", burst=1, rest_s=STEP_S)))
        return 0
    if arguments.attack:
        attack(arguments.attack, clients=arguments.clients)
        return 0
    if arguments.each:
        each = lag_of_each()
        columns = [("request", "<"), ("status", "d"), ("lag ms", ".1f")]
        goals = [
            Floor("greatest lag of a request, ms", each[0][2], MOST_LAG_MS),
            Floor("requests answered with a 500", sum(status == 500 for _, status, _ in each), 0),
        ]
        return tell({"each": each}, table(columns, each), about=machine(), floors=goals, check=arguments.check)
    found, left = measure(clients=arguments.clients, seconds=arguments.seconds)
    alone, beside = found.values()
    columns = [("neighbour", "<"), *((name, ".2f") for name in ("lag p50 ms", "p99.9", "max", "step ms"))]
    goals = [
        Floor("lag at p99.9 beside hostile clients, ms", beside.lag_p999_ms, MOST_LAG_MS),
        Floor("step beside hostile clients, of alone", beside.step_ms / alone.step_ms, MOST_STEP_RATIO),
        Floor("answers with a 500", left.failures, 0),
        Floor("choices left", left.choices, 0),
        Floor("tasks left", left.tasks, SPARE_TASKS),
    ]
    rows = [(name, *asdict(one).values()) for name, one in found.items()]
    record = {name: asdict(one) for name, one in found.items()} | {"left": asdict(left)}
    return tell(record, table(columns, rows), about=machine(), floors=goals, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
