"""Measures n choices on two vLLM servers that prefill and decode apart, through Motet's gateway and without it.

Three ways take turns, so that noise of the machine affects all of them:

    gateway   one prefill, one ticket; the first choice fetches the KV with it, the others find it in the prefix cache
    naive     as vLLM's proxies do: n to the prefill server, n to the decode server, all with the same ticket
    clamped   the same with one choice to the prefill server

Each row has transfers, bytes, prompt tokens that decode computes again, the first token of the first and of the last
choice, and the total. Every request has a prompt that no cache has. Each vLLM has a core to itself; the gateway and
this client share both. Prints a table, and JSON on the last line.

`--check` fails when the gateway moves a prompt more than once.

Run: python -m bench.vllm_pd --vllm VENV [--ns 1,8] [--repeats 3] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.client.load import Load, Timing, median_timing, open_client
from bench.client.prompts import TEXT, FreshPrompts, new_seed
from bench.program.command_line import load_parser, progress
from bench.program.report import Table, columns_table, machine, tell
from bench.servers.vllm_pair import VLLMCounters, VLLMPair, vllm_pair
from motet.deploy.child import ChildServer
from motet.models.model_source import resolve
from motet.settings.server_config import cache_folder, environment

GATEWAY = "gateway"
WAYS = (GATEWAY, "naive", "clamped")
SETTLE_S = 1.5
"""vLLM's counters follow after a delay."""


@dataclass(frozen=True)
class Cost:
    """The median times of the repeats of one way and one n, and the growth of vLLM's counters in the last repeat."""

    timing: Timing
    spent: VLLMCounters


@dataclass(frozen=True)
class Row:
    n: int
    costs: Mapping[str, Cost]

    @property
    def broken(self) -> list[str]:
        transfers = self.costs[GATEWAY].spent.transfers
        return [] if transfers == 1 else [f"n={self.n}: {transfers} transfers, not 1"]

    def ratio(self, way: str) -> float:
        """Returns the way's total divided by the gateway's."""
        return self.costs[way].timing.total_s / self.costs[GATEWAY].timing.total_s


async def measure(pair: VLLMPair, gateway: str, arguments: argparse.Namespace) -> list[Row]:
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(open_client(gateway))
        await stack.enter_async_context(pair.prefill)
        await stack.enter_async_context(pair.decode)
        loads = {
            GATEWAY: Load(front, arguments.max_tokens, count_blocks=False, seeded=False),
            "naive": straight(pair, arguments.max_tokens, once=False),
            "clamped": straight(pair, arguments.max_tokens, once=True),
        }
        fresh = FreshPrompts(await loads[GATEWAY].tokens_of(TEXT), seed=new_seed())
        for load in loads.values():
            await load.group(fresh.next(arguments.prompt_tokens), 2, seed=0)  # warm-up
        rows = []
        for n in arguments.ns:
            rows.append(Row(n, await costs_of(n, pair, loads, fresh, arguments)))
            progress(f"n = {n}: " + ", ".join(f"{way} {rows[-1].costs[way].timing.total_s:.2f} s" for way in WAYS))
        return rows


def straight(pair: VLLMPair, max_tokens: int, *, once: bool) -> Load:
    """Returns a load for the two servers, without a gateway. `once`: ask for one choice at prefill."""
    prepare = pair.prepare_once if once else pair.prepare
    return Load(pair.decode, max_tokens, prepare=prepare, count_blocks=False, seeded=False)


async def costs_of(
    n: int, pair: VLLMPair, loads: Mapping[str, Load], fresh: FreshPrompts, arguments: argparse.Namespace
) -> dict[str, Cost]:
    timings: dict[str, list[Timing]] = {way: [] for way in loads}
    spent = {}
    for repeat in range(arguments.repeats):
        for way, load in loads.items():
            before = await pair.counters()
            timings[way].append(await load.group(fresh.next(arguments.prompt_tokens), n, seed=repeat))
            await asyncio.sleep(SETTLE_S)
            spent[way] = await pair.counters() - before
    return {way: Cost(median_timing(timings[way]), spent[way]) for way in loads}


def table_of(rows: Sequence[Row]) -> Table:
    heads = [("n", ""), ("way", "<"), ("transfers", ""), ("MB", ".1f"), ("recomputed", "")]
    times = [("first s", ".2f"), ("last first s", ".2f"), ("total s", ".2f"), ("total: ratio", ".2f")]
    return columns_table([*heads, *times], (cells_of(row, way) for row in rows for way in row.costs))


def cells_of(row: Row, way: str) -> Sequence[object]:
    timing, spent = row.costs[way].timing, row.costs[way].spent
    moved = (spent.transfers, spent.num_bytes / 1e6, spent.computed_tokens)
    return (row.n, way, *moved, timing.first_s, timing.last_first_s, timing.total_s, row.ratio(way))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.vllm_pd", __doc__, ns=(1, 3, 8, 32), prompt_tokens=1200, max_tokens=64, repeats=3)
    parser.add_argument("--vllm", type=Path, required=True, help="virtual environment with vLLM")
    parser.add_argument("--block-size", type=int, help="tokens of a KV block; unset: vLLM's own, 128 on a CPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about = machine()
    model = resolve(arguments.model, cache=cache_folder(environment()), say=progress)
    blocks = () if arguments.block_size is None else ("--block-size", str(arguments.block_size))
    with vllm_pair(arguments.vllm, model, blocks) as pair:
        workers = ("--worker", f"{pair.prefill.base_url},prefill", "--worker", f"{pair.decode.base_url},decode")
        own = ("--tokenizer", str(model), "--bypass-tokens", "0", "--worker-timeout", "30")
        with ChildServer([*workers, *own], command="gateway") as gateway:
            rows = asyncio.run(measure(pair, gateway.url, arguments))
    broken = [line for row in rows for line in row.broken]
    record = {"rows": [asdict(row) for row in rows], "broken": broken}
    tell(record, table_of(rows), *(f"BROKEN {line}" for line in broken), about=about)
    return 1 if arguments.check and broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
