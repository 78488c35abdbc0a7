"""Measures the API process's CPU time per streamed token, and the cost of a bare ASGI application next to it.

There are three processes. This process is the load client. One process serves Motet's API over a scripted engine
(`bench.frontend.scripted_engine`) with the real tokenizer of the default model. One process replays the bytes that the
second one sent (`bench.frontend.measured_server`). The cost is the CPU time of the server process, requests included,
divided by the number of tokens.

Answers come as fast as they can be sent. Groups take their steps together and therefore end together, and all clients
send their next request at the same moment: times to the first token are measured in such bursts of requests. The
servers take turns in each repeat. Each figure is the best of the repeats, because other programs on the machine can
only make it worse. Prints a table, and JSON on the last line.

Targets (`--check` fails if one is missed): at n = 1 and 64 clients at most 1.5 times the bare application; at n = 64 at
most 3 us per token; with 16 clients, 99 of 100 first tokens within 15 ms; 99 of 100 gaps in a burst within 20 ms.

Run: python -m bench.frontend [--ns 1,64] [--clients 1,64] [--repeats 5] [--tokens 100000] [--check]
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median

from bench.frontend.costs import ApiCost, BurstGaps, FrontendReport, FrontendRow, best_of, percentile
from bench.frontend.part_costs import engine_us, pipe_us
from bench.frontend.raw_client import NAP_S, ROUTES, LoadCase, RawClients, Received
from bench.frontend.server_process import ServerKind, ServerProcess
from bench.program.command_line import add_check, benchmark_parser, numbers, progress
from bench.program.report import machine

BURST = 4
REST_S = 0.05


def measure(case: LoadCase, servers: dict[ServerKind, ServerProcess], repeats: int) -> FrontendRow:
    """Measures a load on each server. The servers take turns in each repeat."""
    costs: dict[ServerKind, list[ApiCost]] = {kind: [] for kind in servers}
    with ExitStack() as stack:
        clients = {
            kind: stack.enter_context(RawClients(server.url, case.clients, nap_s=case.nap_s))
            for kind, server in servers.items()
        }
        for kind in servers:
            clients[kind].load(case.request, requests=1)  # warm-up; the bare server records its answer
        for _ in range(repeats):
            for kind, server in servers.items():
                began_s = server.cpu_s
                received = clients[kind].load(case.request, requests=case.requests)
                costs[kind].append(cost_of(case, received, cpu_s=server.cpu_s - began_s))
    route = case.route if case.stream else f"{case.route}, not streamed"
    bare = best_of(costs["bare"]) if "bare" in costs else None
    row = FrontendRow(route, case.n, case.clients, case.max_tokens, best_of(costs["motet"]), bare)
    progress(f"{route}, n = {case.n}, {case.clients} clients: {row.motet.us_per_token:.2f} us per token")
    return row


def cost_of(case: LoadCase, received: Received, *, cpu_s: float) -> ApiCost:
    case.check(received)
    return ApiCost(
        us_per_token=cpu_s / case.tokens * 1e6,
        tokens_per_s=case.tokens / received.wall_s,
        first_p50_ms=median(received.first_s) * 1e3,
        first_p99_ms=percentile(received.first_s, 99) * 1e3,
    )


def long_case(route: str, n: int, clients: int, tokens: int, *, stream: bool = True) -> LoadCase:
    """Returns a load with answers so long that the cost of requests is small: about `tokens` tokens for n up to 8,
    proportionally more above."""
    max_tokens = max(128, 1024 // n)
    requested = tokens * max(1, n // 8)
    requests = max(1, round(requested / (n * clients * max_tokens)))
    return LoadCase(route, n, clients, max_tokens, requests, stream, NAP_S)


def measure_bursts() -> BurstGaps:
    """Measures answers of one burst each, over one connection. When requests and answers alternate, the kernel delays
    its acknowledgements, and a server that waits for them stalls."""
    case = LoadCase("completions", 1, 1, max_tokens=BURST, requests=50)
    bursts = ServerProcess("motet", "--burst", str(BURST), "--rest-s", str(REST_S))
    with bursts as server, RawClients(server.url, 1) as clients:
        received = clients.load(case.request, requests=case.requests)
    case.check(received)
    gaps_s = [later - earlier for reads_s in received.reads_s for earlier, later in pairwise(reads_s)]
    return BurstGaps.of([gap_s * 1e3 for gap_s in gaps_s])


def report(ns: Sequence[int], clients: Sequence[int], *, tokens: int, repeats: int) -> FrontendReport:
    with ServerProcess("bare") as bare, ServerProcess("motet") as motet:
        servers: dict[ServerKind, ServerProcess] = {"bare": bare, "motet": motet}
        streamed = [
            measure(long_case(route, n, count, tokens), servers, repeats)
            for route in ROUTES
            for n in ns
            for count in clients
        ]
        first = measure(LoadCase("chat", 1, 16, max_tokens=64, requests=20), servers, repeats)
        alone: dict[ServerKind, ServerProcess] = {"motet": motet}
        complete = [measure(long_case("chat", n, clients[-1], tokens, stream=False), alone, repeats) for n in ns]
        one_token = measure(LoadCase("chat", 1, 16, max_tokens=1, requests=50), alone, repeats)
    parts = {f"scripted engine, {count} groups of {n}": engine_us(count, n) for n in ns for count in clients[-1:]}
    parts |= {
        f"pipe of the real engine, {count} groups of {n}": pipe_us(count, n) for n in ns for count in (1, 64 // n)
    }
    request_us = one_token.motet.us_per_token
    return FrontendReport(machine(), streamed, complete, first, request_us, measure_bursts(), parts)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = benchmark_parser("bench.frontend", __doc__)
    parser.add_argument("--ns", type=numbers, default=(1, 8, 64), help="values of n, e.g. 1,64")
    parser.add_argument("--clients", type=numbers, default=(1, 16, 64), help="numbers of clients, in ascending order")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of a load at n = 1; more for n above 8")
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements of each load")
    add_check(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    found = report(arguments.ns, arguments.clients, tokens=arguments.tokens, repeats=arguments.repeats)
    return found.print(check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
