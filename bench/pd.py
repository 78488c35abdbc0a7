"""Measures n choices on a prefill and a decode worker, against one process with the same cores, and against vLLM.

For n = 1, 3, 8, 32 it reads from the workers' counters what was prefilled, moved and computed again, and measures the
first token of the first and of the last choice and the total. Every request has a prompt that no cache has. Prints a
table, and JSON on the last line.

Checks (`--check` fails when one is missed): for any n one prefill, one transfer, the KV of the prompt once, and one
recomputed token.

Run: python -m bench.pd [--ns 1,8] [--repeats 3] [--vllm VENV] [--threads T] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench.client.load import Load, LoadSetup, Timing, median_timing, open_client
from bench.client.prompts import TEXT, FreshPrompts, new_seed
from bench.fork import measure_groups
from bench.program.command_line import load_parser, progress
from bench.program.report import Table, columns_table, machine, tell
from bench.servers.vllm_pair import VLLMCounters, VLLMPair, vllm_pair
from motet.deploy.child import BlockSize, ChildServer, CounterSnapshot, block_size_in
from motet.errors import EngineError
from motet.models.model_source import resolve
from motet.settings.server_config import cache_folder, environment

CELL = ("--prefill", "1", "--decode", "1", "--bypass-tokens", "0")


@dataclass(frozen=True)
class Row:
    """The results for one n. `spent`: the growth of the cell's counters during one request."""

    n: int
    cell: Timing
    spent: CounterSnapshot
    trunk_bytes: int
    single: Timing
    vllm: Timing | None
    vllm_spent: VLLMCounters | None

    @property
    def wrong(self) -> list[str]:
        """Returns a line for each counter that is not as promised."""
        promised = {
            "prefills": (self.spent.prefills, 1),
            "transfers": (self.spent.kv_transfers, 1),
            "bytes": (self.spent.kv_transfer_bytes, self.trunk_bytes),
            "recomputed tokens": (self.spent.recomputed_tokens, 1),
        }
        return [f"n={self.n}: {what} {got}, not {want}" for what, (got, want) in promised.items() if got != want]


async def measure_vllm(
    pair: VLLMPair, tokens: Sequence[int], setup: LoadSetup
) -> dict[int, tuple[Timing, VLLMCounters]]:
    found = {}
    async with pair.prefill, pair.decode:
        load = Load(pair.decode, setup.max_tokens, prepare=pair.prepare, count_blocks=False, seeded=False)
        fresh = FreshPrompts(tokens, seed=new_seed())
        await load.group(fresh.next(setup.prompt_tokens), 1, seed=0)  # warm-up
        for n in setup.ns:
            measured = []
            try:
                for repeat in range(setup.repeats):
                    before = await pair.counters()
                    measured.append(await load.group(fresh.next(setup.prompt_tokens), n, seed=repeat))
                    await asyncio.sleep(1)  # its counters follow after a delay
                    spent = await pair.counters() - before
            except (httpx.HTTPError, EngineError) as error:
                progress(f"vLLM, n = {n}: failed after {len(measured)} of {setup.repeats}: {error!r}")
            if measured:
                found[n] = (median_timing(measured), spent)
                progress(f"vLLM, n = {n}: {found[n][0].total_s:.2f} s")
    return found


async def facts_of(url: str) -> tuple[list[int], BlockSize]:
    """Returns the tokens that prompts are made of, and the size of a KV block."""
    async with open_client(url) as client:
        tokens = await Load(client, 1).tokens_of(TEXT)
        return tokens, block_size_in((await client.get("/metrics")).text)


def measure(setup: LoadSetup, arguments: argparse.Namespace) -> list[Row]:
    """Measures the cell, one process and vLLM one after the other, each with the machine to itself."""
    threads = ("--threads", str(arguments.threads)) if arguments.threads else ()
    with ChildServer([arguments.model, *CELL, *threads]) as server:
        cell = asyncio.run(measure_groups(server.url, setup))
        tokens, block = asyncio.run(facts_of(server.url))
    with ChildServer([arguments.model]) as server:
        single = asyncio.run(measure_groups(server.url, setup))
    vllm: dict[int, tuple[Timing, VLLMCounters]] = {}
    if arguments.vllm:
        model = resolve(arguments.model, cache=cache_folder(environment()), say=progress)
        with vllm_pair(arguments.vllm, model) as pair:
            vllm = asyncio.run(measure_vllm(pair, tokens, setup))
    trunk_bytes = block.bytes_of(setup.prompt_tokens - 1)
    return [Row(n, *cell[n], trunk_bytes, single[n][0], *vllm.get(n, (None, None))) for n in setup.ns]


def table_of(rows: Sequence[Row]) -> Table:
    heads = [("n", ""), ("transfers", ""), ("MB", ".1f"), ("of trunk", ".2f"), ("recomputed", "")]
    heads += [("first / last s", ""), ("total s", ".2f"), ("one process: first / last s", ""), ("total s", ".2f")]
    heads += [("vLLM: transfers", ""), ("MB", ".1f"), ("first / last s", ""), ("total s", ".2f")]
    return columns_table(heads, map(cells_of, rows))


def cells_of(row: Row) -> Sequence[object]:
    spent, vllm, theirs = row.spent, row.vllm, row.vllm_spent
    moved = (spent.kv_transfers, spent.kv_transfer_bytes / 1e6, spent.kv_transfer_bytes / row.trunk_bytes)
    ours = (*moved, spent.recomputed_tokens, firsts(row.cell), row.cell.total_s, firsts(row.single), row.single.total_s)
    if vllm is None or theirs is None:
        return (row.n, *ours, None, None, None, None)
    return (row.n, *ours, theirs.transfers, theirs.num_bytes / 1e6, firsts(vllm), vllm.total_s)


def firsts(timing: Timing) -> str:
    return f"{timing.first_s:.2f} / {timing.last_first_s:.2f}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.pd", __doc__, ns=(1, 3, 8, 32), prompt_tokens=1200, max_tokens=64, repeats=3)
    parser.add_argument("--threads", type=int, help="threads of each engine of the cell; unset: the cores are shared")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM, to measure it too")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about = machine()
    rows = measure(LoadSetup.of(arguments), arguments)
    wrong = [line for row in rows for line in row.wrong]
    record = {"rows": [asdict(row) for row in rows], "broken": wrong}
    tell(record, table_of(rows), *(f"BROKEN {line}" for line in wrong), about=about)
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
