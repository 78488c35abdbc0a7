"""Measures the API process's CPU time for a streamed token, beside a bare ASGI application that sends the same bytes.

There are three processes: this one is the load client, one serves Motet's API over a scripted engine
(`bench.frontend.scripted_engine`) with the real tokenizer of the default model, one replays what that sent
(`bench.frontend.measured_server`). The cost is the CPU time of the server process, requests included, divided by the
tokens. Answers come as fast as they can be sent. Groups take their steps together and so end together, and all clients
send their next request at the same moment: times to the first token are those of such a crowd. In each repeat the
servers take turns. Each figure is the best of the repeats, since neighbours on a machine can only make it worse; what
the server itself does is in each of them. Prints a table, and JSON on the last line.

Floors (`--check` fails when one is missed): at n = 1 and 64 clients at most 1.5 times the bare application; at n = 64
at most 3 us a token; with 16 clients, 99 of 100 first tokens within 15 ms; 99 of 100 gaps in a burst within 20 ms.

Run: python -m bench.frontend [--ns 1,64] [--clients 1,64] [--repeats 5] [--tokens 100000] [--check]
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

import psutil

from bench.frontend.costs import Cost, Gaps, Report, Row, percentile
from bench.frontend.part_costs import engine_us, pipe_us
from bench.frontend.raw_client import Clients, Taken, request_bytes
from bench.program.command_line import numbers, progress
from bench.program.report import machine
from motet.errors import StartupError

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPT = "What is a motet?"
BURST = 4
REST_S = 0.05
NAP_S = 0.002
STOP_S = 60.0

Kind = Literal["motet", "bare", "real"]


@dataclass(frozen=True)
class Case:
    """A load: each of `clients` clients sends a request for n choices of `max_tokens`, `requests` times."""

    route: str
    n: int
    clients: int
    max_tokens: int
    requests: int
    stream: bool = True
    nap_s: float = 0.0
    """Seconds between two looks of the clients at what has come."""

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

    def check(self, taken: Taken) -> None:
        """Raises AssertionError unless every token came in an event of its own (the text is plain English)."""
        begun = 1 + (self.n if self.route == "chat" else 0)  # [DONE], and in chats the roles
        expected = self.tokens + self.clients * self.requests * begun if self.stream else 0
        if taken.events != expected:
            raise AssertionError(f"{self}: {taken.events} events came, not {expected}")


class Server:
    """A server of one kind, in a process that runs inside the `with` block."""

    def __init__(self, kind: Kind, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "bench.frontend.measured_server", kind, *arguments]
        self._environ: Mapping[str, str] | None = None

    def __enter__(self) -> "Server":
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environ,
            text=True,
        )
        said = self._process.stdout or ()
        self.url = next((line.strip() for line in said if line.startswith("http")), "")
        if not self.url:
            raise StartupError(f"the server ended before it was ready; see {' '.join(self._command)}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=STOP_S)  # closes its standard input, which ends it

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system


def measure(case: Case, servers: dict[Kind, Server], repeats: int) -> Row:
    """Measures a load on each server; in each repeat they take turns."""
    costs: dict[Kind, list[Cost]] = {kind: [] for kind in servers}
    with ExitStack() as stack:
        clients = {
            kind: stack.enter_context(Clients(server.url, case.clients, nap_s=case.nap_s))
            for kind, server in servers.items()
        }
        for kind in servers:
            clients[kind].load(case.request, requests=1)  # warm-up; the bare server learns what to send
        for _ in range(repeats):
            for kind, server in servers.items():
                began_s = server.cpu_s
                taken = clients[kind].load(case.request, requests=case.requests)
                costs[kind].append(cost_of(case, taken, cpu_s=server.cpu_s - began_s))
    route = case.route if case.stream else f"{case.route}, whole"
    bare = together(costs["bare"]) if "bare" in costs else None
    row = Row(route, case.n, case.clients, case.max_tokens, together(costs["motet"]), bare)
    progress(f"{route}, n = {case.n}, {case.clients} clients: {row.motet.us_per_token:.2f} us a token")
    return row


def cost_of(case: Case, taken: Taken, *, cpu_s: float) -> Cost:
    case.check(taken)
    return Cost(
        us_per_token=cpu_s / case.tokens * 1e6,
        tokens_per_s=case.tokens / taken.wall_s,
        first_p50_ms=median(taken.first_s) * 1e3,
        first_p99_ms=percentile(taken.first_s, 99) * 1e3,
    )


def together(costs: Sequence[Cost]) -> Cost:
    """Returns the best of each figure."""
    return Cost(
        us_per_token=min(cost.us_per_token for cost in costs),
        tokens_per_s=max(cost.tokens_per_s for cost in costs),
        first_p50_ms=min(cost.first_p50_ms for cost in costs),
        first_p99_ms=min(cost.first_p99_ms for cost in costs),
    )


def long_case(route: str, n: int, clients: int, tokens: int, *, stream: bool = True) -> Case:
    """Returns a load with answers so long that requests hardly count: about `tokens` tokens for up to 8 choices, more
    for more."""
    max_tokens = max(128, 1024 // n)
    wanted = tokens * max(1, n // 8)
    return Case(route, n, clients, max_tokens, max(1, round(wanted / (n * clients * max_tokens))), stream, NAP_S)


def measure_bursts() -> Gaps:
    """Measures answers of one burst each, over one connection. When requests and answers alternate, the kernel delays
    its acknowledgements, and a server that waits for them stalls."""
    case = Case("completions", 1, 1, max_tokens=BURST, requests=50)
    with Server("motet", "--burst", str(BURST), "--rest-s", str(REST_S)) as server, Clients(server.url, 1) as clients:
        taken = clients.load(case.request, requests=case.requests)
    case.check(taken)
    return Gaps.of([(later - earlier) * 1e3 for reads_s in taken.reads_s for earlier, later in pairwise(reads_s)])


def report(ns: Sequence[int], clients: Sequence[int], *, tokens: int, repeats: int) -> Report:
    with Server("bare") as bare, Server("motet") as motet:
        servers: dict[Kind, Server] = {"bare": bare, "motet": motet}
        streamed = [
            measure(long_case(route, n, count, tokens), servers, repeats)
            for route in ROUTES
            for n in ns
            for count in clients
        ]
        first = measure(Case("chat", 1, 16, max_tokens=64, requests=20), servers, repeats)
        alone: dict[Kind, Server] = {"motet": motet}
        whole = [measure(long_case("chat", n, clients[-1], tokens, stream=False), alone, repeats) for n in ns]
        one = measure(Case("chat", 1, 16, max_tokens=1, requests=50), alone, repeats)
    parts = {f"scripted engine, {count} groups of {n}": engine_us(count, n) for n in ns for count in clients[-1:]}
    parts |= {
        f"pipe of the real engine, {count} groups of {n}": pipe_us(count, n) for n in ns for count in (1, 64 // n)
    }
    return Report(machine(), streamed, whole, first, one.motet.us_per_token, measure_bursts(), parts)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ns", type=numbers, default=(1, 8, 64), help="choices of a request, e.g. 1,64")
    parser.add_argument("--clients", type=numbers, default=(1, 16, 64), help="numbers of clients, in rising order")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of a load at n = 1; more for n above 8")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each load")
    parser.add_argument("--check", action="store_true", help="fail when a floor is missed")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    found = report(arguments.ns, arguments.clients, tokens=arguments.tokens, repeats=arguments.repeats)
    return found.tell(check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
