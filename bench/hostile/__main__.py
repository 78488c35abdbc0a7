"""Measures the cost that hostile clients with a key cause to another client: large requests of all kinds, repeated.

A server with an engine that takes a step every 10 ms runs in a separate process. A client streams from it, first alone,
then while hostile clients send the requests of `bench.hostile.large_requests` and run `bench.hostile.courses`, in turn.
"lag" is how late the event loop of the server wakes a task that sleeps for a millisecond (`bench.hostile.loop_lag`);
"step" is the mean time between two tokens of the stream. No answer must have the status 500, and after the hostile
clients have left, none of their choices and tasks must remain. Prints a table, the targets, and JSON on the last line.

With `--each`, every request is sent alone, three times, and every course runs once. The lag of a request is the maximum
lag until its answer ended; the lowest of the three counts, because other work on the machine can only add to it.

With `--engine`, a real engine is shared (`bench.hostile.engine_shares`).

Run: python -m bench.hostile [--clients 4] [--seconds 10] [--each | --engine]
"""

import argparse
import http.client
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from urllib.parse import urlsplit

import httpx
import uvloop

from bench.frontend.measured_server import serve
from bench.hostile import engine_shares
from bench.hostile.courses import COURSES
from bench.hostile.large_requests import ANSWERED, MESSAGE, REFUSED
from bench.hostile.loop_lag import MAX_LAG_MS, LagServer, lag_server, print_lags
from bench.program.command_line import add_check, benchmark_parser
from bench.program.report import Cells, Target, machine, print_report, table

JSON = {"content-type": "application/json"}
STEP_S = 0.01
MAX_STEP_RATIO = 1.2
SETTLE_S = 30.0
SPARE_TASKS = 3
"""Number of tasks that can remain: the measuring client's own connection has some."""
TASKS = re.compile(r"(?m)^motet:event_loop_tasks (.*)$")
FAILED = re.compile(r'(?m)^motet:http_requests_total\{.*status="500".*\} (.*)$')


@dataclass(frozen=True)
class StreamShare:
    """The service that a streaming client got in one interval."""

    lag_p50_ms: float
    lag_p999_ms: float
    lag_max_ms: float
    step_ms: float

    def cells(self, name: str) -> Cells:
        return [
            ("client", name, "<"),
            ("lag p50 ms", self.lag_p50_ms, ".2f"),
            ("p99.9", self.lag_p999_ms, ".2f"),
            ("max", self.lag_max_ms, ".2f"),
            ("step ms", self.step_ms, ".2f"),
        ]


@dataclass(frozen=True)
class Aftermath:
    """The state of the server after the hostile clients have left."""

    failures: int
    """Number of answers with the status 500."""
    choices: int
    """Number of choices that are still running or waiting."""
    tasks: int
    """Number of tasks of the event loop in addition to the tasks before."""


def requests_by_name() -> dict[str, tuple[str, bytes]]:
    refused = {name: (path, make()) for name, (path, make, _) in REFUSED.items()}
    return refused | {name: (path, make()) for name, (path, make) in ANSWERED.items()}


def send(server: str, path: str, content: bytes) -> int:
    """Returns the status of the answer. Returns 0 if there is no answer, as for a body that is refused before its
    end."""
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
    """Returns all requests and courses by name. Each returns the statuses that it received."""
    server = urlsplit(url).netloc

    def sending(path: str, content: bytes) -> list[int]:
        return [send(server, path, content)]

    each: dict[str, Callable[[], list[int]]] = {
        name: partial(sending, path, content) for name, (path, content) in requests_by_name().items()
    }
    return each | {name: partial(course, server) for name, course in COURSES.items()}


def attack(url: str, *, clients: int) -> None:
    """Sends all requests and runs all courses repeatedly, until standard input ends, which it does with the parent."""
    every = list(acts(url).values())
    os.nice(engine_shares.NICENESS)

    def repeat(first: int) -> None:
        for act in itertools.islice(itertools.cycle(every), first, None):
            with suppress(OSError):
                act()

    for number in range(clients):
        threading.Thread(target=repeat, args=(number * len(every) // clients,), daemon=True).start()
    sys.stdin.read()


@contextmanager
def attacking(url: str, *, clients: int) -> Iterator[None]:
    """Runs the hostile clients in a separate process, which is killed at the end of the context."""
    command = [sys.executable, "-m", "bench.hostile", "--attack", url, "--clients", str(clients)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def stream_share(server: LagServer, *, seconds: float) -> StreamShare:
    """Streams for at least that many seconds."""
    body = {"messages": [MESSAGE], "max_tokens": 400, "stream": True}
    steps, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=600) as response:
            response.raise_for_status()
            steps += sum(line.startswith("data: ") for line in response.iter_lines())
    ended = time.monotonic()
    lags_ms = server.lags_ms(start, ended)
    p50, p999 = (lags_ms[int(part * len(lags_ms))] for part in (0.5, 0.999))
    return StreamShare(p50, p999, lags_ms[-1], 1000 * (ended - start) / steps)


def tasks_and_failures(url: str) -> tuple[int, int]:
    exposition = httpx.get(f"{url}/metrics").text
    return int(float(TASKS.findall(exposition)[0])), int(sum(map(float, FAILED.findall(exposition))))


def aftermath(url: str, *, tasks_before: int) -> Aftermath:
    """Waits until nothing is left, for `SETTLE_S` at most, and returns what is left."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        (worker,) = httpx.get(f"{url}/status").json()["workers"]
        tasks, failures = tasks_and_failures(url)
        left = Aftermath(failures, worker["choices_running"] + worker["choices_waiting"], tasks - tasks_before)
        if (left.choices == 0 and left.tasks <= SPARE_TASKS) or time.monotonic() > deadline_s:
            return left
        time.sleep(0.5)


def measure(*, clients: int, seconds: float) -> tuple[dict[str, StreamShare], Aftermath]:
    with lag_server("bench.hostile", "--serve", kill=True) as server:
        alone = stream_share(server, seconds=seconds)
        tasks_before, _ = tasks_and_failures(server.url)
        with attacking(server.url, clients=clients):
            under_attack = stream_share(server, seconds=seconds)
        left = aftermath(server.url, tasks_before=tasks_before)
    return {"alone": alone, "with hostile clients": under_attack}, left


def lag_of_each() -> list[tuple[str, int, float]]:
    """Returns the name, the highest status and the lag in milliseconds of each act, in descending order of the lag."""
    found = []
    with lag_server("bench.hostile", "--serve", kill=True) as server:
        for name, act in acts(server.url).items():
            lags_ms, statuses = [], [0]
            for _ in range(1 if name in COURSES else 3):
                start = time.monotonic()
                statuses += act()
                lags_ms.append(server.max_lag_ms(start, time.monotonic()))
            found.append((name, max(statuses), min(lags_ms)))
    return sorted(found, key=lambda row: -row[2])


def report_each(*, check: bool) -> int:
    each = lag_of_each()
    shown = table(
        [("request", name, "<"), ("status", status, "d"), ("lag ms", lag, ".1f")] for name, status, lag in each
    )
    targets = [
        Target("maximum lag of a request, ms", each[0][2], MAX_LAG_MS),
        Target("requests with status 500", sum(status == 500 for _, status, _ in each), 0),
    ]
    return print_report({"each": each}, shown, conditions=machine(), targets=targets, check=check)


def report(*, clients: int, seconds: float, check: bool) -> int:
    found, left = measure(clients=clients, seconds=seconds)
    alone, under_attack = found.values()
    targets = [
        Target("lag p99.9 with hostile clients, ms", under_attack.lag_p999_ms, MAX_LAG_MS),
        Target("step with hostile clients / alone", under_attack.step_ms / alone.step_ms, MAX_STEP_RATIO),
        Target("answers with status 500", left.failures, 0),
        Target("choices left", left.choices, 0),
        Target("tasks left", left.tasks, SPARE_TASKS),
    ]
    shown = table(share.cells(name) for name, share in found.items())
    record = {name: asdict(share) for name, share in found.items()} | {"left": asdict(left)}
    return print_report(record, shown, conditions=machine(), targets=targets, check=check)


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser("bench.hostile", __doc__)
    parser.add_argument("--clients", type=int, default=4, help="number of hostile clients")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    add_check(parser)
    parser.add_argument("--each", action="store_true", help="send every request alone, and print the lag of each")
    parser.add_argument("--engine", action="store_true", help="measure an ordinary client of a real engine")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        uvloop.run(print_lags(serve("motet", burst=1, rest_s=STEP_S)))
        return 0
    if arguments.attack:
        attack(arguments.attack, clients=arguments.clients)
        return 0
    if arguments.engine:
        return engine_shares.report(seconds=arguments.seconds, check=arguments.check)
    if arguments.each:
        return report_each(check=arguments.check)
    return report(clients=arguments.clients, seconds=arguments.seconds, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
