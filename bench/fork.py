"""Measures n choices of one prompt against n separate requests.

For n = 1, 2, 4 ... 64 it sends one request with n choices of a prompt that is not cached. It sends the same choices as
n separate requests at once to a server without prefix cache. Prints a table, and JSON on the last line.

Targets (`--check` fails if one is missed): at n = 32 the last choice has its first token within 1.3 times the time at
n = 1; the total time is within 4 times the total at n = 1, and within half of the total of 32 separate requests.

Run: make bench, or python -m bench.fork [--ns 1,8,32] [--repeats 3] [--url URL --separate-url URL] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import LoadSetup, TimedLoad, Timing, load_parser, median_timing, open_client
from bench.program.command_line import numbers, progress
from bench.program.report import Cells, Target, machine, print_report, table
from bench.servers.motet_server import counters, motet_server
from motet.deploy.child import CounterSnapshot

NS = (1, 2, 4, 8, 16, 32, 64)
TARGET_N = 32
MIB = 2**20


@dataclass(frozen=True)
class ForkRow:
    """The results for one n."""

    n: int
    group: Timing
    spent: CounterSnapshot
    """Growth of the server's counters during one of the requests."""
    separate: Timing | None
    """Times of n separate requests at once, without prefix cache."""

    def record(self) -> dict[str, object]:
        return asdict(self) | {"decode_tokens_per_s": self.group.decode_tokens_per_s}

    def cells(self) -> Cells:
        separate_s = self.separate and self.separate.total_s
        return [
            ("n", self.n, ""),
            ("first s", self.group.first_s, ".2f"),
            ("last first s", self.group.last_first_s, ".2f"),
            ("total s", self.group.total_s, ".2f"),
            ("tokens/s", self.group.decode_tokens_per_s, ".0f"),
            ("blocks", self.group.blocks_used, ""),
            ("shared", self.spent.blocks_shared, ""),
            ("MiB saved", self.spent.bytes_saved / MIB, ".0f"),
            ("separate s", separate_s, ".2f"),
            ("separate / total", separate_s and separate_s / self.group.total_s, ".1f"),
        ]


async def measure_groups(url: str, setup: LoadSetup) -> dict[int, tuple[Timing, CounterSnapshot]]:
    """Measures one request with n choices, for every n. The counters are taken from the last repeat."""
    measured = {}
    async with open_client(url) as client:
        load = TimedLoad(client, setup.max_tokens)
        fresh = FreshPrompts(await load.tokens_of(TEXT), seed=new_seed())
        await load.group(fresh.next(setup.prompt_tokens), max(setup.ns), seed=0)  # warm-up
        for n in setup.ns:
            timings = []
            for repeat in range(setup.repeats):
                before = await counters(client)
                timings.append(await load.group(fresh.next(setup.prompt_tokens), n, seed=repeat))
                spent = await counters(client) - before
            measured[n] = (median_timing(timings), spent)
            progress(f"n = {n}: {measured[n][0].total_s:.2f} s")
    return measured


async def measure_separate(url: str, ns: Sequence[int], setup: LoadSetup) -> dict[int, Timing]:
    """Measures n requests with one choice each, all at once. It takes long and varies little, so there are no
    repeats."""
    measured = {}
    async with open_client(url) as client:
        load = TimedLoad(client, setup.max_tokens)
        fresh = FreshPrompts(await load.tokens_of(TEXT), seed=new_seed())
        await load.separate(fresh.next(setup.prompt_tokens), 2, seed=0)  # warm-up
        for n in ns:
            measured[n] = await load.separate(fresh.next(setup.prompt_tokens), n, seed=0)
            progress(f"{n} separate: {measured[n].total_s:.2f} s")
    return measured


def measure(setup: LoadSetup, arguments: argparse.Namespace) -> list[ForkRow]:
    """Measures groups, then separate requests. Only one server runs at a time."""
    with ExitStack() as stack:
        url = arguments.url or stack.enter_context(motet_server(arguments.model)).url
        groups = asyncio.run(measure_groups(url, setup))
    separate: dict[int, Timing] = {}
    if arguments.separate_ns:
        with ExitStack() as stack:
            url = arguments.separate_url or stack.enter_context(motet_server(arguments.model, "--no-prefix-cache")).url
            separate = asyncio.run(measure_separate(url, arguments.separate_ns, setup))
    return [ForkRow(n, timing, spent, separate.get(n)) for n, (timing, spent) in groups.items()]


def targets(rows: Sequence[ForkRow]) -> list[Target]:
    """Returns the targets for which there are rows."""
    by_n = {row.n: row for row in rows}
    one, many = by_n.get(1), by_n.get(TARGET_N)
    found = []
    if one and many:
        last_first = many.group.last_first_s / one.group.last_first_s
        found.append(Target(f"last first token at n={TARGET_N} / at n=1", last_first, 1.3))
        found.append(Target(f"total at n={TARGET_N} / at n=1", many.group.total_s / one.group.total_s, 4.0))
    if many and many.separate:
        ratio = many.group.total_s / many.separate.total_s
        found.append(Target(f"total at n={TARGET_N} / of {TARGET_N} separate requests", ratio, 0.5))
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.fork", __doc__, ns=NS, prompt_tokens=1340, max_tokens=64, repeats=3)
    parser.add_argument("--url", help="a running server to use, instead of starting one")
    parser.add_argument("--separate-url", help="a running server without prefix cache, for the separate requests")
    parser.add_argument("--separate-ns", type=numbers, default=NS, help="numbers of separate requests; empty for none")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions = machine()
    rows = measure(LoadSetup.of(arguments), arguments)
    lengths = {"prompt_tokens": arguments.prompt_tokens, "max_tokens": arguments.max_tokens}
    line = f"prompt of {arguments.prompt_tokens} tokens, {arguments.max_tokens} tokens per choice"
    shown = (line, table(row.cells() for row in rows))
    record = {**lengths, "rows": [row.record() for row in rows]}
    return print_report(record, *shown, conditions=conditions, targets=targets(rows), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
