"""Measures the cost of each hop of Motet on Ray Serve: both ingresses, and one server with the same engines.

Prints two tables, and JSON on the last line. For each table all servers run and take turns; figures are medians of the
repeats:

    scripted engines    tokens/s, first token and CPU time per token by process, with many clients: the engine costs
                        almost nothing. With "own port", clients connect to the replica without Serve's proxy
    default model       one request at a time, with a prompt that is not cached; one prefill and one decode engine

Run: python -m bench.ray [--haproxy gateway] [--cases 1x16,8x16,64x4] [--ns 1,8,32] [--repeats 3] [--no-model]
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import TimedLoad, Timing, median_timing, open_client
from bench.frontend.raw_client import LoadCase, RawClients
from bench.frontend.server_process import ServerProcess
from bench.program.command_line import benchmark_parser, numbers, progress
from bench.program.report import machine, print_report, table
from bench.ray.hop_costs import HopCost, HopRow, model_rows
from bench.ray.process_cpu import cpu_by_part, own_url
from bench.servers.ports import free_port
from motet.deploy.child import ChildServer
from motet.settings.ray_config import Ingress
from motet.settings.server_config import environment

HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
MODEL = "smollm2"
PROMPT_TOKENS, MAX_TOKENS = 1200, 64
CPUS = "1"


@dataclass(frozen=True)
class HopWay:
    """A server and one of its addresses."""

    name: str
    url: str
    pid: int


class ScriptedOnRay(ServerProcess):
    """`bench.ray.scripted_server` in a process that runs inside the `with` block."""

    def __init__(self, ingress: Ingress, environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "bench.ray.scripted_server", ingress, "--port", str(free_port())]
        self._environ = {**environment(), **environ}


@contextmanager
def scripted_ways(haproxy: Ingress | None) -> Iterator[list[HopWay]]:
    with ExitStack() as stack:
        alone = stack.enter_context(ServerProcess("motet"))
        ways = [HopWay("one server", alone.url, alone.pid)]
        for ingress, part in ((Ingress.GATEWAY, "gateway"), (Ingress.DIRECT, "decode")):
            server = stack.enter_context(ScriptedOnRay(ingress, {}))
            ways.append(HopWay(f"{ingress}, own port", own_url(server.pid, part), server.pid))
            ways.append(HopWay(str(ingress), server.url, server.pid))
            if ingress == haproxy:
                server = stack.enter_context(ScriptedOnRay(ingress, HAPROXY))
                ways.append(HopWay(f"{ingress}, HAProxy", server.url, server.pid))
        yield ways


def measure_case(case: LoadCase, ways: Sequence[HopWay], repeats: int) -> list[HopRow]:
    costs: dict[str, list[HopCost]] = {way.name: [] for way in ways}
    with ExitStack() as stack:
        clients = {way.name: stack.enter_context(RawClients(way.url, case.clients)) for way in ways}
        for way in ways:
            clients[way.name].load(case.request, requests=1)  # warm-up
        for _ in range(repeats):
            for way in ways:
                before = cpu_by_part(way.pid)
                received = clients[way.name].load(case.request, requests=case.requests)
                check(case, received.events)
                spent = cpu_by_part(way.pid)
                parts = {part: (s - before.get(part, 0.0)) / case.tokens * 1e6 for part, s in spent.items()}
                costs[way.name].append(HopCost(case.tokens / received.wall_s, median(received.first_s), parts))
    progress(f"n = {case.n}, {case.clients} clients")
    return [HopRow(way.name, case.n, case.clients, HopCost.median(costs[way.name])) for way in ways]


def check(case: LoadCase, events: int) -> None:
    """Raises AssertionError if tokens are missing. Proxies cut answers into other chunks, and the client does not count
    an event that starts in one chunk and ends in the next: a few in ten thousand."""
    if not 0.999 < events / case.tokens < 1.05:
        raise AssertionError(f"{case}: {events} events came")


async def measure_model(ns: Sequence[int], repeats: int) -> dict[str, dict[int, Timing]]:
    """Returns the times by way and n."""
    shape = (MODEL, "--prefill", "1", "--decode", "1")
    on_ray = ("--ray-address", "local", "--cpus-per-worker", CPUS)
    with ExitStack() as stack:
        urls = {"local cell": stack.enter_context(ChildServer((*shape, "--threads", CPUS))).url}
        for ingress in Ingress:
            arguments = (*shape, *on_ray, "--ingress", ingress)
            urls[str(ingress)] = stack.enter_context(ChildServer(arguments, command="ray", port=free_port())).url
        timings: dict[str, dict[int, list[Timing]]] = {name: {n: [] for n in ns} for name in urls}
        clients = {name: open_client(url) for name, url in urls.items()}
        loads = {name: TimedLoad(client, MAX_TOKENS, count_blocks=False) for name, client in clients.items()}
        fresh = FreshPrompts(await loads["local cell"].tokens_of(TEXT), seed=new_seed())
        for load in loads.values():
            await load.group(fresh.next(PROMPT_TOKENS), 2, seed=0)  # warm-up
        for repeat in range(repeats):
            for n in ns:
                for name, load in loads.items():
                    timings[name][n].append(await load.group(fresh.next(PROMPT_TOKENS), n, seed=repeat))
        for client in clients.values():
            await client.aclose()
    return {name: {n: median_timing(found) for n, found in by_n.items()} for name, by_n in timings.items()}


def cases(text: str) -> list[LoadCase]:
    """Parses `1x16,8x16`: n and the number of clients of each case."""
    found = []
    for part in text.split(","):
        n, clients = map(int, part.split("x"))
        requests = max(1, round(128 / (n * clients) * 4))
        found.append(LoadCase("completions", n, clients, max_tokens=256, requests=requests))
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = benchmark_parser("bench.ray", __doc__)
    parser.add_argument(
        "--haproxy",
        type=Ingress,
        choices=tuple(Ingress),
        help="measure this ingress with Ray's HAProxy too; only one, because the port of HAProxy's metrics is fixed",
    )
    parser.add_argument("--cases", type=cases, default="1x16,8x16,64x4", help="n x clients for scripted engines")
    parser.add_argument("--ns", type=numbers, default=(1, 8, 32), help="values of n for the default model")
    parser.add_argument("--repeats", type=int, default=3, help="number of measurements of each load")
    parser.add_argument("--no-model", action="store_true", help="measure only scripted engines")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    with scripted_ways(arguments.haproxy) as ways:
        rows = [row for case in arguments.cases for row in measure_case(case, ways, arguments.repeats)]
    model = {} if arguments.no_model else asyncio.run(measure_model(arguments.ns, arguments.repeats))
    shown = [table(row.cells() for row in rows), *([table(model_rows(model))] if model else [])]
    timings = {way: {n: asdict(timing) for n, timing in by_n.items()} for way, by_n in model.items()}
    record = {"rows": [asdict(row) for row in rows], "model": timings}
    return print_report(record, *shown, conditions=machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
