"""n choices of one prompt on a prefill and a decode worker, against one process with the same cores, and against vLLM.

For n = 1, 3, 8, 32: what is prefilled, moved and computed again, by the workers' own counters; the first token of the
first and of the last choice; the total. Every request has a prompt that no cache knows. Prints a table, and JSON on the
last line.

Checks (`--check` fails when one is missed): one prefill, one transfer, the KV of the prompt once, and one recomputed
token, whatever n is.

Run: python -m bench.pd [--ns 1,8] [--repeats 3] [--vllm VENV] [--threads T] [--check]
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.fork import Setup, connected, measure_groups, numbers, progress
from bench.load import Load, Timing, middle
from bench.machine import machine
from bench.prompt import TEXT, FreshPrompts, seed_of_this_run
from bench.vllm_pair import VLLMCounters, VLLMPair, vllm_pair
from motet.config import cache_folder, environment
from motet.deploy.child import ChildServer
from motet.deploy.figures import BlockSize, Figures, block_size_in
from motet.errors import EngineError
from motet.models import resolve
from motet.models.smollm2 import DEFAULT_MODEL

TABLE_WIDTH = 160
CELL = ("--prefill", "1", "--decode", "1", "--bypass-tokens", "0")


@dataclass(frozen=True)
class Row:
    """All about one n; `spent` is what one request cost."""

    n: int
    cell: Timing
    spent: Figures
    trunk_bytes: int
    single: Timing
    vllm: Timing | None
    vllm_spent: VLLMCounters | None

    @property
    def wrong(self) -> list[str]:
        """What was not as promised."""
        promised = {
            "prefills": (self.spent.prefills, 1),
            "transfers": (self.spent.kv_transfers, 1),
            "bytes": (self.spent.kv_transfer_bytes, self.trunk_bytes),
            "recomputed tokens": (self.spent.recomputed_tokens, 1),
        }
        return [f"n={self.n}: {what} {got}, not {want}" for what, (got, want) in promised.items() if got != want]


async def measure_vllm(pair: VLLMPair, tokens: Sequence[int], setup: Setup) -> dict[int, tuple[Timing, VLLMCounters]]:
    found = {}
    async with pair.prefill, pair.decode:
        load = Load(pair.decode, setup.max_tokens, prepare=pair.prepare, count_blocks=False, seeded=False)
        fresh = FreshPrompts(tokens, seed=seed_of_this_run())
        await load.group(fresh.next(setup.prompt_tokens), 1, seed=0)  # warm-up
        for n in setup.ns:
            measured = []
            try:
                for repeat in range(setup.repeats):
                    before = await pair.counters()
                    measured.append(await load.group(fresh.next(setup.prompt_tokens), n, seed=repeat))
                    await asyncio.sleep(1)  # its counters follow at their own pace
                    spent = await pair.counters() - before
            except (httpx.HTTPError, EngineError) as error:
                progress(f"vLLM, n = {n}: failed after {len(measured)} of {setup.repeats}: {error!r}")
            if measured:
                found[n] = (middle(measured), spent)
                progress(f"vLLM, n = {n}: {found[n][0].total_s:.2f} s")
    return found


async def facts_of(url: str) -> tuple[list[int], BlockSize]:
    """What prompts are made of, and what a block of their KV is."""
    async with connected(url) as client:
        tokens = await Load(client, 1).tokens_of(TEXT)
        return tokens, block_size_in((await client.get("/metrics")).text)


def measure(setup: Setup, arguments: argparse.Namespace) -> list[Row]:
    """One after the other, each with the machine to itself."""
    threads = ("--threads", str(arguments.threads)) if arguments.threads else ()
    with ChildServer([arguments.model, *CELL, *threads]) as server:
        cell = asyncio.run(measure_groups(server.url, setup))
        tokens, block = asyncio.run(facts_of(server.url))
    with ChildServer([arguments.model]) as server:
        single = asyncio.run(measure_groups(server.url, setup))
    vllm: dict[int, tuple[Timing, VLLMCounters]] = {}
    if arguments.vllm:
        model = resolve(arguments.model, cache=cache_folder(environment()), say=progress)
        with vllm_pair(arguments.vllm, model.path) as pair:
            vllm = asyncio.run(measure_vllm(pair, tokens, setup))
    trunk_bytes = block.bytes_of(setup.prompt_tokens - 1)
    return [Row(n, *cell[n], trunk_bytes, single[n][0], *vllm.get(n, (None, None))) for n in setup.ns]


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("n", "transfers", "MB", "of trunk", "recomputed", "first / last s", "total s"):
        table.add_column(head, justify="right")
    for head in ("one process: first / last s", "total s", "vLLM: transfers", "MB", "first / last s", "total s"):
        table.add_column(head, justify="right")
    for row in rows:
        theirs = ("-", "-", "-", "-")
        if row.vllm and row.vllm_spent:
            moved = (str(row.vllm_spent.transfers), f"{row.vllm_spent.num_bytes / 1e6:.1f}")
            theirs = (*moved, firsts(row.vllm), f"{row.vllm.total_s:.2f}")
        table.add_row(
            str(row.n),
            str(row.spent.kv_transfers),
            f"{row.spent.kv_transfer_bytes / 1e6:.1f}",
            f"{row.spent.kv_transfer_bytes / row.trunk_bytes:.2f}",
            str(row.spent.recomputed_tokens),
            firsts(row.cell),
            f"{row.cell.total_s:.2f}",
            firsts(row.single),
            f"{row.single.total_s:.2f}",
            *theirs,
        )
    return table


def firsts(timing: Timing) -> str:
    return f"{timing.first_s:.2f} / {timing.last_first_s:.2f}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--ns", type=numbers, default=(1, 3, 8, 32), help="numbers of choices, e.g. 1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=1200)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a choice")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each engine of the cell; by default the cores are shared")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM, to measure that too")
    parser.add_argument("--check", action="store_true", help="fail when a promise is broken")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    setup = Setup(arguments.ns, (), arguments.prompt_tokens, arguments.max_tokens, arguments.repeats)
    at_start = machine()
    rows = measure(setup, arguments)
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    for name, value in at_start.items():
        console.print(f"{name:12} {value}", highlight=False, soft_wrap=True)
    console.print(table_of(rows))
    wrong = [line for row in rows for line in row.wrong]
    for line in wrong:
        console.print(f"BROKEN {line}", highlight=False)
    print(json.dumps({"rows": [asdict(row) for row in rows], "broken": wrong}))
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
