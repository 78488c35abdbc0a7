"""Measures each hop of Motet on Ray Serve: both ingresses, beside one server with the same engines.

It prints two tables, and JSON on the last line. For each table all servers run and take turns; figures are medians of
the repeats:

    scripted engines    tokens/s, first token and CPU time a token by process, with many clients: the engine costs next
                        to nothing. With "own port" clients ask the replica past Serve's proxy
    default model       one request at a time, with a prompt that no cache has; one prefill and one decode engine

Run: python -m bench.ray [--haproxy gateway] [--cases 1x16,8x16,64x4] [--ns 1,8,32] [--repeats 3] [--no-model]
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median

from bench.client.load import Load, Timing, median_timing, open_client
from bench.client.prompts import TEXT, FreshPrompts, new_seed
from bench.frontend.raw_client import LoadCase, RawClients
from bench.frontend.server_process import ServerProcess
from bench.program.command_line import numbers, progress
from bench.program.report import machine, tell
from bench.ray.hop_costs import Cost, Row, model_table, scripted_table
from bench.ray.process_cpu import cpu_by_part, own_url
from bench.servers.ports import free_port
from motet.deploy.child import ChildServer
from motet.settings.server_config import environment
from motet.types import Ingress

HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
MODEL = "smollm2"
PROMPT_TOKENS, MAX_TOKENS = 1200, 64
CPUS = "1"


@dataclass(frozen=True)
class Way:
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
def scripted_ways(haproxy: Ingress | None) -> Iterator[list[Way]]:
    with ExitStack() as stack:
        alone = stack.enter_context(ServerProcess("motet"))
        ways = [Way("one server", alone.url, alone.pid)]
        for ingress, part in ((Ingress.GATEWAY, "gateway"), (Ingress.DIRECT, "decode")):
            server = stack.enter_context(ScriptedOnRay(ingress, {}))
            ways.append(Way(f"{ingress}, own port", own_url(server.pid, part), server.pid))
            ways.append(Way(str(ingress), server.url, server.pid))
            if ingress == haproxy:
                server = stack.enter_context(ScriptedOnRay(ingress, HAPROXY))
                ways.append(Way(f"{ingress}, HAProxy", server.url, server.pid))
        yield ways


def measure_case(case: LoadCase, ways: Sequence[Way], repeats: int) -> list[Row]:
    costs: dict[str, list[Cost]] = {way.name: [] for way in ways}
    with ExitStack() as stack:
        clients = {way.name: stack.enter_context(RawClients(way.url, case.clients)) for way in ways}
        for way in ways:
            clients[way.name].load(case.request, requests=1)  # warm-up
        for _ in range(repeats):
            for way in ways:
                before = cpu_by_part(way.pid)
                taken = clients[way.name].load(case.request, requests=case.requests)
                check(case, taken.events)
                spent = cpu_by_part(way.pid)
                parts = {part: (s - before.get(part, 0.0)) / case.tokens * 1e6 for part, s in spent.items()}
                costs[way.name].append(Cost(case.tokens / taken.wall_s, median(taken.first_s), parts))
    progress(f"n = {case.n}, {case.clients} clients")
    return [Row(way.name, case.n, case.clients, Cost.middle(costs[way.name])) for way in ways]


def check(case: LoadCase, events: int) -> None:
    """Raises AssertionError if tokens are missing. Proxies cut answers into other chunks, and the client does not count
    an event that begins in one chunk and ends in the next: a few in ten thousand."""
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
        loads = {name: Load(client, MAX_TOKENS, count_blocks=False) for name, client in clients.items()}
        fresh = FreshPrompts(await loads["local cell"].tokens_of(TEXT), seed=new_seed())
        for load in loads.values():
            await load.group(fresh.next(PROMPT_TOKENS), 2, seed=0)  # warm-up
        for repeat in range(repeats):
            for n in ns:
                for name, load in loads.items():
                    timings[name][n].append(await load.group(fresh.next(PROMPT_TOKENS), n, seed=repeat))
        for client in clients.values():
            await client.aclose()
    return {name: {n: median_timing(taken) for n, taken in by_n.items()} for name, by_n in timings.items()}


def cases(text: str) -> list[LoadCase]:
    """Reads `n`x`clients`, with commas between several."""
    found = []
    for part in text.split(","):
        n, clients = map(int, part.split("x"))
        found.append(
            LoadCase("completions", n, clients, max_tokens=256, requests=max(1, round(128 / (n * clients) * 4)))
        )
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--haproxy",
        type=Ingress,
        choices=tuple(Ingress),
        help="measure this ingress behind Ray's HAProxy too; only one, because HAProxy's port for metrics is fixed",
    )
    parser.add_argument("--cases", type=cases, default="1x16,8x16,64x4", help="choices x clients for scripted engines")
    parser.add_argument("--ns", type=numbers, default=(1, 8, 32), help="choices for the default model")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each load")
    parser.add_argument("--no-model", action="store_true", help="measure scripted engines only")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    with scripted_ways(arguments.haproxy) as ways:
        rows = [row for case in arguments.cases for row in measure_case(case, ways, arguments.repeats)]
    model = {} if arguments.no_model else asyncio.run(measure_model(arguments.ns, arguments.repeats))
    shown = (scripted_table(rows), *([model_table(model)] if model else []))
    timings = {way: {n: asdict(timing) for n, timing in by_n.items()} for way, by_n in model.items()}
    return tell({"rows": [asdict(row) for row in rows], "model": timings}, *shown, about=machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
