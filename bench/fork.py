"""What n choices of one prompt cost, against n separate requests.

For n = 1, 2, 4 ... 64: one request with n choices of a prompt that no cache knows, and the same choices as n separate
requests sent at once to a server without prefix cache. Prints a table, and JSON on the last line.

Floors (`--check` fails when one is missed): the last first token at n = 32 within 1.3 times that of n = 1; the total
at n = 32 within 4 times that of n = 1 and under half of that of 32 separate requests.

Run: make bench, or python -m bench.fork [--ns 1,8,32] [--repeats 3] [--url URL --separate-url URL] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
from rich.console import Console

from bench.load import TIMEOUT_S, Load, Timing, middle
from bench.machine import machine
from bench.prompt import TEXT, FreshPrompts, seed_of_this_run
from bench.report import Report, Row, floors
from motet.deploy.child import ChildServer
from motet.deploy.figures import Figures, figures_in
from motet.models.smollm2 import DEFAULT_MODEL

NS = (1, 2, 4, 8, 16, 32, 64)
PRINTED_WIDTH = 120
KV_CACHE_GB = "3"
"""Room for 64 separate requests of 1340 tokens, which share nothing."""


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    ns: tuple[int, ...]
    separate_ns: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    repeats: int


async def measure_groups(url: str, setup: Setup) -> dict[int, tuple[Timing, Figures]]:
    """One request with n choices, for every n; the counters are those of the last repeat."""
    measured = {}
    async with connected(url) as client:
        load = Load(client, setup.max_tokens)
        fresh = FreshPrompts(await load.tokens_of(TEXT), seed=seed_of_this_run())
        await load.group(fresh.next(setup.prompt_tokens), max(setup.ns), seed=0)  # warm-up
        for n in setup.ns:
            timings = []
            for repeat in range(setup.repeats):
                before = await counters(client)
                timings.append(await load.group(fresh.next(setup.prompt_tokens), n, seed=repeat))
                spent = await counters(client) - before
            measured[n] = (middle(timings), spent)
            progress(f"n = {n}: {measured[n][0].total_s:.2f} s")
    return measured


async def measure_separate(url: str, setup: Setup) -> dict[int, Timing]:
    """n requests with one choice each, all at once. Not repeated: that takes long and varies little."""
    measured = {}
    async with connected(url) as client:
        load = Load(client, setup.max_tokens)
        fresh = FreshPrompts(await load.tokens_of(TEXT), seed=seed_of_this_run())
        await load.separate(fresh.next(setup.prompt_tokens), 2, seed=0)  # warm-up
        for n in setup.separate_ns:
            measured[n] = await load.separate(fresh.next(setup.prompt_tokens), n, seed=0)
            progress(f"{n} separate: {measured[n].total_s:.2f} s")
    return measured


def connected(url: str) -> httpx.AsyncClient:
    """A client with a connection for each of any number of requests."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


async def counters(client: httpx.AsyncClient) -> Figures:
    return figures_in((await client.get("/metrics")).text)


def server(model: str, *more: str) -> ChildServer:
    return ChildServer([model, "--kv-cache-gb", KV_CACHE_GB, *more])


def measure(setup: Setup, arguments: argparse.Namespace) -> Report:
    """Both halves, one after the other, each with the machine to itself."""
    at_start = machine()
    with ExitStack() as stack:
        url = arguments.url or stack.enter_context(server(arguments.model)).url
        groups = asyncio.run(measure_groups(url, setup))
    separate: dict[int, Timing] = {}
    if setup.separate_ns:
        with ExitStack() as stack:
            url = arguments.separate_url or stack.enter_context(server(arguments.model, "--no-prefix-cache")).url
            separate = asyncio.run(measure_separate(url, setup))
    rows = [Row(n, timing, spent, separate.get(n)) for n, (timing, spent) in groups.items()]
    return Report(at_start, setup.prompt_tokens, setup.max_tokens, rows, floors(rows))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--url", help="a running server, in place of one started here")
    parser.add_argument("--separate-url", help="the same, without prefix cache")
    parser.add_argument("--ns", type=numbers, default=NS, help="numbers of choices, e.g. 1,8,32")
    parser.add_argument("--separate-ns", type=numbers, default=NS, help="numbers of separate requests; empty: none")
    parser.add_argument("--prompt-tokens", type=int, default=1340)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a choice")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="fail when a floor is missed")
    return parser.parse_args(argv)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    setup = Setup(arguments.ns, arguments.separate_ns, arguments.prompt_tokens, arguments.max_tokens, arguments.repeats)
    report = measure(setup, arguments)
    report.print(Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH))
    print(report.json())
    return 1 if arguments.check and not report.all_floors_met else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
