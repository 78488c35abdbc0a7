"""Measures n choices of one prompt against n separate requests.

For n = 1, 2, 4 ... 64 it sends one request with n choices of a prompt that no cache has, and the same choices as n
separate requests at once, to a server without prefix cache. Prints a table, and JSON on the last line.

Floors (`--check` fails when one is missed): at n = 32 the last choice has its first token within 1.3 times the time at
n = 1, and the total is within 4 times that at n = 1 and within half of that of 32 separate requests.

Run: make bench, or python -m bench.fork [--ns 1,8,32] [--repeats 3] [--url URL --separate-url URL] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import httpx
from rich.table import Table

from bench.client.load import TIMEOUT_S, Load, Setup, Timing, middle, numbers, options, progress
from bench.client.prompts import TEXT, FreshPrompts, seed_of_this_run
from bench.results.report import Floor, machine, table, tell
from motet.deploy.child import ChildServer, CounterSnapshot, figures_in

NS = (1, 2, 4, 8, 16, 32, 64)
FLOOR_N = 32
MIB = 2**20
KV_CACHE_GB = "3"
"""GiB of KV: room for 64 separate requests of 1340 tokens, which share nothing."""


@dataclass(frozen=True)
class Row:
    """The results for one n."""

    n: int
    group: Timing
    spent: CounterSnapshot
    """The growth of the server's counters during one of the requests."""
    separate: Timing | None
    """The time of n requests at once, without prefix cache."""

    def record(self) -> dict[str, object]:
        return asdict(self) | {"decode_tokens_per_s": self.group.decode_tokens_per_s}


async def measure_groups(url: str, setup: Setup) -> dict[int, tuple[Timing, CounterSnapshot]]:
    """Measures one request with n choices, for every n. The counters are those of the last repeat."""
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


async def measure_separate(url: str, ns: Sequence[int], setup: Setup) -> dict[int, Timing]:
    """Measures n requests with one choice each, all at once. No repeats: this takes long and varies little."""
    measured = {}
    async with connected(url) as client:
        load = Load(client, setup.max_tokens)
        fresh = FreshPrompts(await load.tokens_of(TEXT), seed=seed_of_this_run())
        await load.separate(fresh.next(setup.prompt_tokens), 2, seed=0)  # warm-up
        for n in ns:
            measured[n] = await load.separate(fresh.next(setup.prompt_tokens), n, seed=0)
            progress(f"{n} separate: {measured[n].total_s:.2f} s")
    return measured


def connected(url: str) -> httpx.AsyncClient:
    """Returns a client without a limit on connections."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


async def counters(client: httpx.AsyncClient) -> CounterSnapshot:
    return figures_in((await client.get("/metrics")).text)


def server(model: str, *more: str) -> ChildServer:
    return ChildServer([model, "--kv-cache-gb", KV_CACHE_GB, *more])


def measure(setup: Setup, arguments: argparse.Namespace) -> list[Row]:
    """Measures groups, then separate requests, each with the machine to itself."""
    with ExitStack() as stack:
        url = arguments.url or stack.enter_context(server(arguments.model)).url
        groups = asyncio.run(measure_groups(url, setup))
    separate: dict[int, Timing] = {}
    if arguments.separate_ns:
        with ExitStack() as stack:
            url = arguments.separate_url or stack.enter_context(server(arguments.model, "--no-prefix-cache")).url
            separate = asyncio.run(measure_separate(url, arguments.separate_ns, setup))
    return [Row(n, timing, spent, separate.get(n)) for n, (timing, spent) in groups.items()]


def table_of(rows: Sequence[Row]) -> Table:
    heads = [("n", ""), ("first s", ".2f"), ("last first s", ".2f"), ("total s", ".2f"), ("tokens/s", ".0f")]
    heads += [("blocks", ""), ("shared", ""), ("MiB saved", ".0f"), ("separate s", ".2f"), ("gain", ".1f")]
    return table(heads, map(cells_of, rows))


def cells_of(row: Row) -> Sequence[object]:
    group, spent, separate_s = row.group, row.spent, row.separate and row.separate.total_s
    times = (group.first_s, group.last_first_s, group.total_s, group.decode_tokens_per_s)
    saved = (group.blocks_used, spent.blocks_shared, spent.bytes_saved / MIB)
    return (row.n, *times, *saved, separate_s, separate_s and separate_s / group.total_s)


def floors(rows: Sequence[Row]) -> list[Floor]:
    """Returns the floors for which there are rows."""
    by_n = {row.n: row for row in rows}
    one, many = by_n.get(1), by_n.get(FLOOR_N)
    found = []
    if one and many:
        last_first = many.group.last_first_s / one.group.last_first_s
        found.append(Floor(f"last first token, n={FLOOR_N} to n=1", last_first, 1.3))
        found.append(Floor(f"total, n={FLOOR_N} to n=1", many.group.total_s / one.group.total_s, 4.0))
    if many and many.separate:
        ratio = many.group.total_s / many.separate.total_s
        found.append(Floor(f"total, n={FLOOR_N} to {FLOOR_N} separate requests", ratio, 0.5))
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = options(__doc__, ns=NS, prompt_tokens=1340, max_tokens=64, repeats=3)
    parser.add_argument("--url", help="a running server, in place of one started here")
    parser.add_argument("--separate-url", help="a running server without prefix cache, for the separate requests")
    parser.add_argument("--separate-ns", type=numbers, default=NS, help="numbers of separate requests; empty: none")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about = machine()
    rows = measure(Setup.of(arguments), arguments)
    asked = {"prompt_tokens": arguments.prompt_tokens, "max_tokens": arguments.max_tokens}
    shown = f"prompt {arguments.prompt_tokens} tokens, {arguments.max_tokens} tokens a choice"
    record = {**asked, "rows": [row.record() for row in rows]}
    return tell(record, shown, table_of(rows), about=about, floors=floors(rows), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
