"""Measures what traces cost the API process, in CPU time for an answer.

Single answers take turns, in a new order in each round, each behind one of the same server that does not count: of a
server without traces; of one with `--otlp-endpoint`, to a client that says that its trace is not recorded; of the same
server, to a client that says that it is. So the last two differ in nothing but the spans, and are of the same process;
the first is another process, which may differ by some percent in how its memory lies. CPU time is the kernel's, of all
threads: what else runs on the machine costs only what it does to caches and clock rates, and neighbours in time are hit
alike. A ratio is the median of the ratios of all rounds, with the interval in which the true median is with 95 % (by
ranks).

Spans are handed to the process that sends them five times a second. That is measured by itself, for those of some
answers together, beside an idle server without traces, and added to what recorded answers cost. `all` is the API
process, the engine, and the process that sends spans. The collector takes all and keeps nothing. Prints a table, and
JSON on the last line.

The engine is the scripted one of `bench.frontend`, so that the API process does all the work, or with `--real` the
default model.

Floor (`--check` fails when it is missed): at n = 8 at most 2 % more in the API process.

Run: python -m bench.traces [--ns 1,8,64] [--tokens 128] [--rounds 1000] [--real] [--check]
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from statistics import median
from typing import Self

import psutil

from bench.frontend.raw_client import NAP_S, LoadCase, RawClients
from bench.frontend.server_process import ServerKind, ServerProcess
from bench.program.command_line import numbers
from bench.program.report import machine
from motet.tracing.sender import HAND_OVER_S, PROGRAM

MOST_AT_8 = 1.02
NEAR = 1.96
"""Standard deviations of a normal distribution within which 95 % of it are."""
CPU_CLOCK = 2
"""Together with a process's id, the kernel's name of the clock of its CPU time."""
HANDED_OVER_S = HAND_OVER_S + 0.05
"""Time after which all spans have been given to the process that sends them."""
SENT_S = 1.1
"""Time after that in which the process has sent them."""
ROUNDS_AT_ONCE = 20
"""Rounds between two measurements of that."""
AT_ONCE = 8
"""Answers whose spans are handed over together, for n up to 8; fewer for more, so that they are done before that."""
WARM_UP = 20
"""Answers of each kind before the first that counts."""
TRACE = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


@dataclass(frozen=True)
class Interval:
    """The median of some ratios, and where it may be."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, these: Sequence[float], those: Sequence[float], *, more: float = 0.0) -> Self:
        """Of the ratios of neighbours in time. `more`: what is added to each. The true median is with 95 % between two
        ratios whose ranks are so far from the middle."""
        ranked = sorted(one / other + more for one, other in zip(these, those, strict=True))
        low = max(0, math.floor((len(ranked) - NEAR * math.sqrt(len(ranked))) / 2))
        return cls(ranked[low], median(ranked), ranked[-1 - low])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Row:
    api_us: float
    """CPU time of the API process for an answer that is not recorded, the median."""
    engine_us: float
    """That of the engine's process; 0 if it is the scripted one."""
    hand_over_us: float
    """CPU time in which the API process hands over the spans of an answer, which is in the ratios."""
    sender_us: float
    """CPU time of the process that sends them."""
    unsampled: Interval
    """The API process's, of answers that are not recorded, to those of a server without traces."""
    recorded: Interval
    """The API process's, of answers that are recorded, to those that are not, of the same server."""
    recorded_all: Interval
    """The same of all processes."""


@dataclass(frozen=True)
class Spent:
    """CPU time in microseconds."""

    api: float
    engine: float
    sender: float

    @classmethod
    def by(cls, server: ServerProcess) -> Self:
        """Returns what a server has spent until now."""
        under = psutil.Process(server.pid).children(recursive=True)
        senders = {child.pid for child in under if PROGRAM in child.cmdline()}
        engine = sum(cpu_us(child.pid) for child in under if child.pid not in senders)
        return cls(cpu_us(server.pid), engine, sum(map(cpu_us, senders)))

    def __sub__(self, before: "Spent") -> "Spent":
        return Spent(self.api - before.api, self.engine - before.engine, self.sender - before.sender)


def with_trace(request: bytes, *, sampled: bool) -> bytes:
    return request.replace(b"\r\n", f"\r\n{TRACE}0{int(sampled)}\r\n".encode(), 1)


class TakesAll(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing."""


@contextmanager
def collector(port: int = 0) -> Iterator[str]:
    """A collector in a process of its own, so that it does not slow the clients down. `port`: 0 for any."""
    command = [sys.executable, "-m", "bench.traces", "--collect", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # it was asked for
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def collect(port: int) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", port), TakesAll)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


def cpu_us(pid: int) -> float:
    """Returns the CPU time of a process, all its threads together, also those that have ended, in microseconds."""
    return time.clock_gettime_ns(~pid << 3 | CPU_CLOCK) / 1000


def measure(case: LoadCase, servers: Mapping[str, tuple[ServerProcess, bytes]], *, rounds: int, real: bool) -> Row:
    """`servers`: each with the request that it gets."""
    spent: dict[str, list[Spent]] = {name: [] for name in servers}
    hand_over: list[float] = []
    sender: list[float] = []
    order, (off, _), (recording, request) = Random(1), servers["off"], servers["on"]
    _, warm_up = servers["unsampled"]
    at_once = max(1, AT_ONCE * 8 // max(8, case.n))
    for number in range(rounds):
        for name, (server, asked) in order.sample([*servers.items()], len(servers)):
            with RawClients(server.url, case.clients, nap_s=case.nap_s) as clients:
                clients.load(warm_up, requests=1 if number else WARM_UP)
                before = Spent.by(server)
                taken = clients.load(asked, requests=1)
                spent[name].append(Spent.by(server) - before)
            if not real:
                case.check(taken)
        if number % ROUNDS_AT_ONCE == 0:
            time.sleep(HANDED_OVER_S)
            with RawClients(recording.url, case.clients, nap_s=case.nap_s) as clients:
                taken = clients.load(request, requests=at_once)
            before, idle = Spent.by(recording), Spent.by(off)
            time.sleep(HANDED_OVER_S)
            if taken.wall_s < HAND_OVER_S or real:
                hand_over.append((Spent.by(recording) - before).api - (Spent.by(off) - idle).api)
            time.sleep(SENT_S)
            sender.append((Spent.by(recording) - before).sender)
    return row_of(spent, hand_over_us=median(hand_over or [0.0]) / at_once, sender_us=median(sender) / at_once)


def row_of(spent: Mapping[str, Sequence[Spent]], *, hand_over_us: float, sender_us: float) -> Row:
    api = {name: [one.api for one in each] for name, each in spent.items()}
    both = {name: [one.api + one.engine for one in each] for name, each in spent.items()}
    api_us, both_us = median(api["unsampled"]), median(both["unsampled"])
    return Row(
        api_us,
        both_us - api_us,
        hand_over_us,
        sender_us,
        Interval.of(api["unsampled"], api["off"]),
        Interval.of(api["on"], api["unsampled"], more=hand_over_us / api_us),
        Interval.of(both["on"], both["unsampled"], more=(hand_over_us + sender_us) / both_us),
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ns", type=numbers, default=(1, 8, 64), help="choices of a request, e.g. 1,64")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a choice")
    parser.add_argument("--rounds", type=int, default=1000, help="answers of each kind")
    parser.add_argument("--real", action="store_true", help="with the default model")
    parser.add_argument("--check", action="store_true", help="fail when the floor is missed")
    parser.add_argument("--collect", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    if arguments.collect is not None:
        collect(arguments.collect)
    rows = {}
    kind: ServerKind = "real" if arguments.real else "motet"
    with collector() as url, ServerProcess(kind) as off, ServerProcess(kind, "--otlp-endpoint", url) as on:
        for n in arguments.ns:
            case = LoadCase("chat", n, 1, arguments.tokens, 1, nap_s=NAP_S)
            servers = {
                "off": (off, case.request),
                "unsampled": (on, with_trace(case.request, sampled=False)),
                "on": (on, with_trace(case.request, sampled=True)),
            }
            rows[n] = row = measure(case, servers, rounds=arguments.rounds, real=arguments.real)
            costs = f"{row.api_us:.0f} us an answer, hand-over {row.hand_over_us:.0f}, engine {row.engine_us:.0f}"
            print(f"n = {n:3}: {costs}, sender {row.sender_us:.0f}", flush=True)
            print(f"    not recorded, to no traces  {row.unsampled}", flush=True)
            print(f"    recorded, to not recorded   {row.recorded}; all {row.recorded_all}", flush=True)
    print(json.dumps({"machine": machine(), "rows": {n: asdict(row) for n, row in rows.items()}}))
    missed = 8 in rows and rows[8].recorded.median > MOST_AT_8
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
