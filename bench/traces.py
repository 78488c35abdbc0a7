"""Measures the cost of traces for the API process, in CPU time per answer.

In each round, three answers are requested in a new order:

    off          from a server without traces
    unsampled    from a server with `--otlp-endpoint`, by a client whose trace is not recorded
    on           from the same server, by a client whose trace is recorded

Before each of them, one answer of the same server is not counted. So `unsampled` and `on` differ only in the spans, and
are measured in the same process. `off` is another process, which can differ by some percent because of the layout of
its memory. CPU time is the kernel's, of all threads: other programs on the machine affect it only through caches and
clock rates, and affect consecutive answers alike. A ratio is the median of the ratios of all rounds, with the interval
that contains the true median with 95 % probability (by ranks).

Five times a second, spans are handed over to the process that sends them. This cost is measured separately, for the
spans of several answers together and in comparison with an idle server without traces, and added to the cost of
recorded answers. "all processes" are the API process, the engine, and the process that sends spans. The collector
accepts everything and keeps nothing. Prints a table, and JSON on the last line.

The engine is the scripted engine of `bench.frontend`, so that the API process does all the work, or with `--real` the
default model.

Target (`--check` fails if it is missed): at n = 8 at most 2 % more CPU time in the API process.

Run: python -m bench.traces [--ns 1,8,64] [--tokens 128] [--rounds 1000] [--real] [--check]
"""

import argparse
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
from bench.program.command_line import add_check, benchmark_parser, numbers, progress
from bench.program.report import Cells, Target, machine, print_report, table
from motet.tracing.sender import FRAME_PERIOD_S, PROGRAM

MAX_AT_8 = 1.02
DEVIATIONS_OF_95_PERCENT = 1.96
"""Number of standard deviations of a normal distribution that contain 95 % of it."""
CPU_CLOCK = 2
"""Number with which, together with the id of a process, the kernel names the CPU clock of the process."""
HANDED_OVER_S = FRAME_PERIOD_S + 0.05
"""Time after which all spans have been handed over to the process that sends them."""
SENT_S = 1.1
"""Further time after which the process has sent them."""
ROUNDS_AT_ONCE = 20
"""Number of rounds between two measurements of the handover."""
AT_ONCE = 8
"""Number of answers whose spans are handed over together, for n up to 8. It is lower for higher n, so that the answers
end before the handover."""
WARM_UP = 20
"""Number of answers of each kind before the first one that counts."""
TRACE = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


@dataclass(frozen=True)
class RatioInterval:
    """The median of several ratios, and the interval that contains the true median with 95 % probability."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, measured: Sequence[float], base: Sequence[float], *, more: float = 0.0) -> Self:
        """Computes the ratios of consecutive measurements, and adds `more` to each. The interval lies between the two
        ratios whose ranks have the required distance from the middle."""
        ranked = sorted(value / other + more for value, other in zip(measured, base, strict=True))
        low = max(0, math.floor((len(ranked) - DEVIATIONS_OF_95_PERCENT * math.sqrt(len(ranked))) / 2))
        return cls(ranked[low], median(ranked), ranked[-1 - low])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class TraceRow:
    api_us: float
    """Median CPU time of the API process per answer that is not recorded."""
    engine_us: float
    """Median CPU time of the engine process per answer that is not recorded; 0 for the scripted engine."""
    hand_over_us: float
    """CPU time of the API process to hand over the spans of an answer. It is contained in the ratios."""
    sender_us: float
    """CPU time of the process that sends the spans of an answer."""
    unsampled: RatioInterval
    """API process: answers that are not recorded / answers of a server without traces."""
    recorded: RatioInterval
    """API process: recorded answers / answers of the same server that are not recorded."""
    recorded_all: RatioInterval
    """All processes: recorded answers / answers of the same server that are not recorded."""

    def cells(self, n: int) -> Cells:
        return [
            ("n", n, ""),
            ("us per answer", self.api_us, ".0f"),
            ("handover", self.hand_over_us, ".0f"),
            ("engine", self.engine_us, ".0f"),
            ("sender", self.sender_us, ".0f"),
            ("not recorded / no traces", self.unsampled, ""),
            ("recorded / not recorded", self.recorded, ""),
            ("all processes", self.recorded_all, ""),
        ]


@dataclass(frozen=True)
class SpentCpu:
    """CPU time in microseconds."""

    api: float
    engine: float
    sender: float

    @classmethod
    def by(cls, server: ServerProcess) -> Self:
        """Returns the CPU time of a server so far."""
        children = psutil.Process(server.pid).children(recursive=True)
        senders = {child.pid for child in children if PROGRAM in child.cmdline()}
        engine = sum(cpu_us(child.pid) for child in children if child.pid not in senders)
        return cls(cpu_us(server.pid), engine, sum(map(cpu_us, senders)))

    def __sub__(self, before: "SpentCpu") -> "SpentCpu":
        return SpentCpu(self.api - before.api, self.engine - before.engine, self.sender - before.sender)


def with_trace(request: bytes, *, sampled: bool) -> bytes:
    return request.replace(b"\r\n", f"\r\n{TRACE}0{int(sampled)}\r\n".encode(), 1)


class AcceptAll(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@contextmanager
def collector(port: int = 0) -> Iterator[str]:
    """Runs a collector in a separate process, so that it does not slow the clients down. Port 0 is any free port."""
    command = [sys.executable, "-m", "bench.traces", "--collect", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # it is a pipe
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def collect(port: int) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", port), AcceptAll)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


def cpu_us(pid: int) -> float:
    """Returns the CPU time of a process in microseconds, including threads that have ended."""
    return time.clock_gettime_ns(~pid << 3 | CPU_CLOCK) / 1000


def measure(case: LoadCase, servers: Mapping[str, tuple[ServerProcess, bytes]], *, rounds: int, real: bool) -> TraceRow:
    """Measures one load. `servers` are the servers by name, each with its request."""
    spent: dict[str, list[SpentCpu]] = {name: [] for name in servers}
    hand_over: list[float] = []
    sender: list[float] = []
    order, (off, _), (recording, request) = Random(1), servers["off"], servers["on"]
    _, warm_up = servers["unsampled"]
    at_once = max(1, AT_ONCE * 8 // max(8, case.n))
    for number in range(rounds):
        for name, (server, content) in order.sample([*servers.items()], len(servers)):
            with RawClients(server.url, case.clients, nap_s=case.nap_s) as clients:
                clients.load(warm_up, requests=1 if number else WARM_UP)
                before = SpentCpu.by(server)
                received = clients.load(content, requests=1)
                spent[name].append(SpentCpu.by(server) - before)
            if not real:
                case.check(received)
        if number % ROUNDS_AT_ONCE == 0:
            time.sleep(HANDED_OVER_S)
            with RawClients(recording.url, case.clients, nap_s=case.nap_s) as clients:
                received = clients.load(request, requests=at_once)
            before, idle = SpentCpu.by(recording), SpentCpu.by(off)
            time.sleep(HANDED_OVER_S)
            if received.wall_s < FRAME_PERIOD_S or real:
                hand_over.append((SpentCpu.by(recording) - before).api - (SpentCpu.by(off) - idle).api)
            time.sleep(SENT_S)
            sender.append((SpentCpu.by(recording) - before).sender)
    return row_of(spent, hand_over_us=median(hand_over or [0.0]) / at_once, sender_us=median(sender) / at_once)


def row_of(spent: Mapping[str, Sequence[SpentCpu]], *, hand_over_us: float, sender_us: float) -> TraceRow:
    api = {name: [cpu.api for cpu in figures] for name, figures in spent.items()}
    both = {name: [cpu.api + cpu.engine for cpu in figures] for name, figures in spent.items()}
    api_us, both_us = median(api["unsampled"]), median(both["unsampled"])
    return TraceRow(
        api_us,
        both_us - api_us,
        hand_over_us,
        sender_us,
        RatioInterval.of(api["unsampled"], api["off"]),
        RatioInterval.of(api["on"], api["unsampled"], more=hand_over_us / api_us),
        RatioInterval.of(both["on"], both["unsampled"], more=(hand_over_us + sender_us) / both_us),
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = benchmark_parser("bench.traces", __doc__)
    parser.add_argument("--ns", type=numbers, default=(1, 8, 64), help="values of n, e.g. 1,64")
    parser.add_argument("--tokens", type=int, default=128, help="number of tokens of a choice")
    parser.add_argument("--rounds", type=int, default=1000, help="number of answers of each kind")
    parser.add_argument("--real", action="store_true", help="use the default model instead of the scripted engine")
    add_check(parser)
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
            rows[n] = measure(case, servers, rounds=arguments.rounds, real=arguments.real)
            progress(f"n = {n}: recorded / not recorded {rows[n].recorded}")
    targets = [Target("CPU time of recorded answers, n=8", rows[8].recorded.median, MAX_AT_8)] if 8 in rows else []
    shown = table(row.cells(n) for n, row in rows.items())
    record = {"rows": {n: asdict(row) for n, row in rows.items()}}
    return print_report(record, shown, conditions=machine(), targets=targets, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
