"""Measures what traces cost the API process, in CPU time for an answer.

Three loads take turns: a server without traces; one with `--otlp-endpoint` and clients that say that their trace is not
recorded; the same server and clients that say that it is. So the last two differ in nothing but the spans. The servers
are those of `bench.frontend`, a scripted engine behind Motet's API. The process that sends the spans is one of its own;
its CPU time is shown beside. The collector takes all and keeps nothing. A ratio is the median of the ratios of
neighbours in time. Prints a table, and JSON on the last line.

Floor (`--check` fails when it is missed): at n = 8 at most 2 % more.

Run: python -m bench.traces [--ns 1,8,64] [--tokens 128] [--requests 20] [--repeats 25] [--check]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

import psutil

from bench.frontend import NAP_S, Case, Server
from bench.frontend_client import Clients
from bench.load import numbers
from bench.report import machine
from motet.tracing.sender import HAND_OVER_S

MOST_AT_8 = 1.02
TRACE = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


@dataclass(frozen=True)
class Row:
    off_us: float
    """CPU time for an answer without traces, the least of the repeats."""
    unsampled: float
    """With traces, of a request whose client says that its trace is not recorded, to that."""
    recorded: float
    """Of a request that is recorded, to one that is not, of the same process."""
    sender_us: float
    """CPU time of the process that sends the spans, for an answer that is recorded."""


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
    """Returns the CPU time of a process, all threads together, in microseconds."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1000


def sender_us(server: Server) -> float:
    return sum(cpu_us(child.pid) for child in psutil.Process(server.pid).children())


def measure(case: Case, servers: dict[str, tuple[Server, bytes]], *, requests: int, repeats: int) -> Row:
    """`servers`: each with the request that it gets."""
    spent: dict[str, list[float]] = {name: [] for name in servers}
    sender: list[float] = []
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(Clients(one.url, case.clients, nap_s=case.nap_s))
            for name, (one, _) in servers.items()
        }
        for name, (_, request) in servers.items():
            clients[name].load(request, requests=10)
        for _ in range(repeats):
            for name, (server, request) in servers.items():
                time.sleep(2 * HAND_OVER_S)
                began, sent = cpu_us(server.pid), sender_us(server)
                case.check(clients[name].load(request, requests=requests))
                time.sleep(2 * HAND_OVER_S)  # the spans are handed over
                spent[name].append((cpu_us(server.pid) - began) / requests)
                sender.append((sender_us(server) - sent) / requests)
    off, unsampled, on = (spent[name] for name in ("off", "unsampled", "on"))
    return Row(min(off), ratio(unsampled, off), ratio(on, unsampled), max(0.0, median(sender[2::3])))


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Returns the median of the ratios of neighbours in time."""
    return median(one / other for one, other in zip(these, those, strict=True))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ns", type=numbers, default=(1, 8, 64), help="choices of a request, e.g. 1,64")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a choice")
    parser.add_argument("--requests", type=int, default=20, help="requests of a repeat")
    parser.add_argument("--repeats", type=int, default=25, help="measurements of each load")
    parser.add_argument("--check", action="store_true", help="fail when the floor is missed")
    parser.add_argument("--collect", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    if arguments.collect is not None:
        collect(arguments.collect)
    rows = {}
    with collector() as url, Server("motet") as off, Server("motet", "--otlp-endpoint", url) as on:
        for n in arguments.ns:
            case = Case("chat", n, 1, arguments.tokens, arguments.requests, nap_s=NAP_S)
            servers = {
                "off": (off, case.request),
                "unsampled": (on, with_trace(case.request, sampled=False)),
                "on": (on, with_trace(case.request, sampled=True)),
            }
            rows[n] = row = measure(case, servers, requests=arguments.requests, repeats=arguments.repeats)
            told = f"not recorded {row.unsampled:.3f}, recorded {row.recorded:.3f}; the sender {row.sender_us:.0f} us"
            print(f"n = {n:3}: {row.off_us:6.0f} us an answer; {told}", flush=True)
    print(json.dumps({"machine": str(machine()), "rows": {n: asdict(row) for n, row in rows.items()}}))
    missed = 8 in rows and rows[8].recorded > MOST_AT_8
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
