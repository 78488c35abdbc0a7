"""Measures n choices on a prefill and a decode worker, against one process with the same cores, and against vLLM.

For n = 1, 3, 8, 32 it reads from the workers' counters the number of prefills, transferred bytes and recomputed tokens,
and measures the first token of the first and of the last choice and the total time. No prompt is cached. Prints a
table, and JSON on the last line.

Checks (`--check` fails if one is missed): for any n one prefill, one transfer, the KV of the prompt once, and one
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

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import LoadSetup, TimedLoad, Timing, load_parser, median_timing, open_client
from bench.fork import measure_groups
from bench.program.command_line import progress
from bench.program.report import Cells, machine, print_report, table
from bench.servers.vllm_pair import VLLMCounters, VLLMPair, vllm_pair
from motet.deploy.child import BlockSize, ChildServer, CounterSnapshot, block_size_in
from motet.errors import EngineError
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment

CELL = ("--prefill", "1", "--decode", "1", "--bypass-tokens", "0")


@dataclass(frozen=True)
class PrefillDecodeRow:
    """The results for one n. `spent` is the growth of the cell's counters during one request."""

    n: int
    cell: Timing
    spent: CounterSnapshot
    trunk_bytes: int
    single: Timing
    vllm: Timing | None
    vllm_spent: VLLMCounters | None

    @property
    def wrong(self) -> list[str]:
        """Returns a line for each counter with an unexpected value."""
        expected = {
            "prefills": (self.spent.prefills, 1),
            "transfers": (self.spent.kv_transfers, 1),
            "bytes": (self.spent.kv_transfer_bytes, self.trunk_bytes),
            "recomputed tokens": (self.spent.recomputed_tokens, 1),
        }
        return [f"n={self.n}: {what} {got}, not {want}" for what, (got, want) in expected.items() if got != want]

    def cells(self) -> Cells:
        spent, vllm, vllm_spent = self.spent, self.vllm, self.vllm_spent
        return [
            ("n", self.n, ""),
            ("transfers", spent.kv_transfers, ""),
            ("MB", spent.kv_transfer_bytes / 1e6, ".1f"),
            ("/ trunk", spent.kv_transfer_bytes / self.trunk_bytes, ".2f"),
            ("recomputed", spent.recomputed_tokens, ""),
            ("first / last s", firsts(self.cell), ""),
            ("total s", self.cell.total_s, ".2f"),
            ("one process: first / last s", firsts(self.single), ""),
            ("total s", self.single.total_s, ".2f"),
            ("vLLM: transfers", vllm_spent and vllm_spent.transfers, ""),
            ("MB", vllm_spent and vllm_spent.num_bytes / 1e6, ".1f"),
            ("first / last s", vllm and firsts(vllm), ""),
            ("total s", vllm and vllm.total_s, ".2f"),
        ]


def firsts(timing: Timing) -> str:
    return f"{timing.first_s:.2f} / {timing.last_first_s:.2f}"


async def measure_vllm(
    pair: VLLMPair, tokens: Sequence[int], setup: LoadSetup
) -> dict[int, tuple[Timing, VLLMCounters]]:
    found = {}
    async with pair.prefill, pair.decode:
        load = TimedLoad(pair.decode, setup.max_tokens, prepare=pair.prepare, count_blocks=False, seeded=False)
        fresh = FreshPrompts(tokens, seed=new_seed())
        await load.group(fresh.next(setup.prompt_tokens), 1, seed=0)  # warm-up
        for n in setup.ns:
            measured = []
            try:
                for repeat in range(setup.repeats):
                    before = await pair.counters()
                    measured.append(await load.group(fresh.next(setup.prompt_tokens), n, seed=repeat))
                    await asyncio.sleep(1)  # vLLM updates its counters with a delay
                    spent = await pair.counters() - before
            except (httpx.HTTPError, EngineError) as error:
                progress(f"vLLM, n = {n}: failed after {len(measured)} of {setup.repeats}: {error!r}")
            if measured:
                found[n] = (median_timing(measured), spent)
                progress(f"vLLM, n = {n}: {found[n][0].total_s:.2f} s")
    return found


async def facts_of(url: str) -> tuple[list[int], BlockSize]:
    """Returns the tokens from which prompts are made, and the size of a KV block."""
    async with open_client(url) as client:
        tokens = await TimedLoad(client, 1).tokens_of(TEXT)
        return tokens, block_size_in((await client.get("/metrics")).text)


def measure(setup: LoadSetup, arguments: argparse.Namespace) -> list[PrefillDecodeRow]:
    """Measures the cell, one process and vLLM one after the other. Only one of them runs at a time."""
    threads = ("--threads", str(arguments.threads)) if arguments.threads else ()
    with ChildServer([arguments.model, *CELL, *threads]) as server:
        cell = asyncio.run(measure_groups(server.url, setup))
        tokens, block = asyncio.run(facts_of(server.url))
    with ChildServer([arguments.model]) as server:
        single = asyncio.run(measure_groups(server.url, setup))
    vllm: dict[int, tuple[Timing, VLLMCounters]] = {}
    if arguments.vllm:
        model = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
        with vllm_pair(arguments.vllm, model) as pair:
            vllm = asyncio.run(measure_vllm(pair, tokens, setup))
    trunk_bytes = block.bytes_of(setup.prompt_tokens - 1)
    return [PrefillDecodeRow(n, *cell[n], trunk_bytes, single[n][0], *vllm.get(n, (None, None))) for n in setup.ns]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.pd", __doc__, ns=(1, 3, 8, 32), prompt_tokens=1200, max_tokens=64, repeats=3)
    parser.add_argument(
        "--threads", type=int, help="threads of each engine of the cell (default: the cores are shared)"
    )
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure vLLM too")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions = machine()
    rows = measure(LoadSetup.of(arguments), arguments)
    wrong = [line for row in rows for line in row.wrong]
    record = {"rows": [asdict(row) for row in rows], "broken": wrong}
    shown = table(row.cells() for row in rows)
    print_report(record, shown, *(f"BROKEN {line}" for line in wrong), conditions=conditions)
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
