"""Compares Motet with another OpenAI-compatible server under the same load. The two servers take turns.

A shape of requests has n choices, a number of prompt tokens, and a number of tokens per choice. Both servers get the
same prompts, which are not cached, one request after the other: Motet, peer, Motet, peer. Figures are medians over the
repeats. The share of a core that each server takes while it is idle is measured and printed.

Both servers sample at temperature 1 and generate up to max_tokens. Requests have no seeds (--seeded adds them), because
vLLM 0.32's CPU build crashes when it computes the prompt of a seeded request in chunks.

With --rate, requests with mixed n and lengths arrive as a Poisson process, the same for both servers.

Prints a table, and JSON on the last line.

Targets (--check fails if one is missed), for prompts of 1340 tokens and 64 tokens per choice: decode tokens/s at least
1.2 times the peer's at n = 1, and 1.4 times at n = 8 and 32; at n = 32 the first token of the last choice within half
of the peer's time, and within 1.1 times Motet's time at n = 1; the total at n = 32 within 0.65 of the peer's.

Run: python -m bench.compare --ours URL --peer URL [--quick] [--ns 1,32] [--repeats 3] [--check] [--plot FILE.png]
     python -m bench.compare --start-ours --start-peer VENV_WITH_VLLM --rate 0.5 [--duration 60]
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import uvloop

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import load_parser
from bench.compare.arrivals import RequestMix, measure_rate, rate_cells, schedule
from bench.compare.grid import QUICK, Grid, GridBench, GridRow, targets
from bench.program.command_line import numbers
from bench.program.report import machine, print_report, table
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server, rounded
from bench.servers.peer_server import all_cores, peer_server
from bench.servers.vllm import VLLMSetup
from motet.deploy.child import ChildServer
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment

MIX = {1: 6.0, 8: 3.0, 32: 1.0}


@dataclass(frozen=True)
class ServerFacts:
    url: str
    model: str
    version: str
    idle_percent: float | None
    """Share of one core in percent that the idle server takes. None if its processes cannot be seen."""

    def __str__(self) -> str:
        return f"{self.model} at {self.url}, version {self.version}, idle {rounded(self.idle_percent, 1)} % of a core"


@dataclass(frozen=True)
class ComparisonConditions:
    """Machine, servers and load of a comparison. Figures mean nothing without them."""

    machine: Mapping[str, str]
    ours: ServerFacts
    peer: ServerFacts
    repeats: int
    seed: int
    """Seed of the prompts and the schedule."""

    @property
    def printed(self) -> dict[str, str]:
        return {**self.machine, "ours": str(self.ours), "peer": str(self.peer), "repeats": str(self.repeats)}


async def compare(urls: tuple[str, str], arguments: argparse.Namespace) -> int:
    """Runs the comparison and returns the exit code."""
    at_start = machine()
    style = RequestStyle(arguments.seeded, arguments.settle)
    async with connect_server("ours", urls[0], style) as ours, connect_server("peer", urls[1], style) as peer:
        fresh = FreshPrompts(await ours.load(1).tokens_of(TEXT), seed=arguments.seed)
        grid = grid_of(arguments)
        bench = GridBench(ours, peer, arguments.repeats, fresh)
        await bench.warm_up(grid)
        facts = [await facts_of(server, arguments.idle) for server in (ours, peer)]
        conditions = ComparisonConditions(at_start, facts[0], facts[1], arguments.repeats, arguments.seed)
        if arguments.rate is None:
            return print_grid(await bench.measure(grid), conditions, arguments)
        mix = RequestMix(arguments.mix, grid.prompt_tokens, grid.max_tokens)
        arrivals = schedule(arguments.rate, arguments.duration, mix, seed=arguments.seed)
        pair = await measure_rate(ours, peer, arrivals, repeats=arguments.repeats, fresh=fresh)
        choices = sum(arrival.n for arrival in arrivals)
        line = f"{len(arrivals)} requests with {choices} choices, {arguments.rate:g} per second"
        record = {"conditions": asdict(conditions), "rate": arguments.rate, "arrivals": len(arrivals)}
        return print_report(record | pair.record(), line, table(rate_cells(pair)), conditions=conditions.printed)


def print_grid(rows: Sequence[GridRow], conditions: ComparisonConditions, arguments: argparse.Namespace) -> int:
    if arguments.plot:
        plot(rows, arguments.plot)
    record = {"conditions": asdict(conditions), "rows": [asdict(row.shape) | row.pair.record() for row in rows]}
    checked = targets(rows) if arguments.check else []
    shown = table(row.cells() for row in rows)
    return print_report(record, shown, conditions=conditions.printed, targets=checked, check=arguments.check)


async def facts_of(server: ComparedServer, idle_s: float) -> ServerFacts:
    return ServerFacts(str(server.client.base_url), server.model, server.version, await server.idle_percent(idle_s))


def grid_of(arguments: argparse.Namespace) -> Grid:
    """Returns the full grid or the quick one, with the values that flags replace."""
    base = QUICK if arguments.quick else Grid()
    return Grid(
        arguments.prompt_tokens or base.prompt_tokens, arguments.max_tokens or base.max_tokens, arguments.ns or base.ns
    )


def servers(arguments: argparse.Namespace, stack: ExitStack) -> tuple[str, str]:
    """Returns the URLs of both servers. Servers that are started here end with `stack`."""
    ours, peer = arguments.ours, arguments.peer
    if arguments.start_ours is not None:
        ours = stack.enter_context(ChildServer([arguments.model, *shlex.split(arguments.start_ours)])).url
    if arguments.start_peer is not None:
        model = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(print))
        started = stack.enter_context(peer_server(VLLMSetup(arguments.start_peer, model, all_cores())))
        started.wait_until_ready()
        peer = started.url
    return ours, peer


def plot(rows: Sequence[GridRow], path: Path) -> None:
    """Draws total time over n, in a panel for each length of prompts and of answers."""
    from bench.program.plot import Curve, PlotPanel, save  # matplotlib is an extra

    panels = []
    for prompt_tokens, max_tokens in dict.fromkeys((row.shape.prompt_tokens, row.shape.max_tokens) for row in rows):
        lengths = (prompt_tokens, max_tokens)
        own = [row for row in rows if (row.shape.prompt_tokens, row.shape.max_tokens) == lengths]
        curves = [
            Curve("ours", [(r.shape.n, s) for r in own if (s := r.pair.ours.get("total_s")) is not None]),
            Curve("peer", [(r.shape.n, s) for r in own if (s := r.pair.peer.get("total_s")) is not None]),
        ]
        title = f"prompt {prompt_tokens}, {max_tokens} tokens per choice"
        panels.append(PlotPanel(title, "choices (n)", "total, s", curves))
    save(panels, path)


def mix(text: str) -> Mapping[int, float]:
    """Parses `1:6,8:3,32:1`: each n and its weight."""
    pairs = (part.split(":") for part in text.split(","))
    return {int(n): float(weight) for n, weight in pairs}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.compare", __doc__, length=numbers, repeats=3)
    ours, peer = (parser.add_mutually_exclusive_group(required=True) for _ in range(2))
    ours.add_argument("--ours", metavar="URL", help="a running Motet")
    ours.add_argument("--start-ours", nargs="?", const="", metavar="ARGS", help="start Motet: --start-ours=--max-n=256")
    peer.add_argument("--peer", metavar="URL", help="a running server of the same model")
    peer.add_argument("--start-peer", type=Path, metavar="VENV", help="start vLLM from its virtual environment")
    parser.add_argument("--quick", action="store_true", help="only the shapes with targets, unless other flags are set")
    parser.add_argument("--seed", type=int, default=new_seed(), help="seed of prompts and arrivals")
    parser.add_argument("--seeded", action="store_true", help="send a seed with each request")
    parser.add_argument("--settle", type=float, default=0.5, help="pause before each request in seconds")
    parser.add_argument("--idle", type=float, default=3.0, help="seconds for which idle servers are measured")
    parser.add_argument("--rate", type=float, help="requests per second, as a Poisson process")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds in which requests arrive")
    parser.add_argument("--mix", type=mix, default=MIX, help="weight of each n among the arrivals: 1:6,8:3,32:1")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw total time over n")
    arguments = parser.parse_args(argv)
    if arguments.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install 'motet[bench]'")
    if arguments.rate is not None and (arguments.plot or arguments.check):
        parser.error("--plot and --check belong to the grid, not to --rate")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    with ExitStack() as stack:
        return uvloop.run(compare(servers(arguments, stack), arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
