"""Measures n choices on two vLLM servers for prefill and decode, through Motet's gateway and without it.

Three ways take turns, so that noise of the machine affects all of them:

    gateway   one prefill, one ticket; the first choice transfers the KV, the others find it in the prefix cache
    naive     as vLLM's proxies do: n to the prefill server, n to the decode server, all with the same ticket
    clamped   the same with one choice to the prefill server

Each row has transfers, bytes, prompt tokens that the decode server recomputes, the first token of the first and of the
last choice, and the total. No prompt is cached. Each vLLM server has one core; the gateway and this client share both
cores. Prints a table, and JSON on the last line.

`--check` fails if the gateway transfers a prompt more than once.

Run: python -m bench.vllm_pd --vllm VENV [--ns 1,8] [--repeats 3] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import TimedLoad, Timing, load_parser, median_timing, open_client
from bench.program.command_line import progress
from bench.program.report import Cells, Table, machine, print_report, table
from bench.servers.vllm_pair import VLLMCounters, VLLMPair, vllm_pair
from motet.deploy.child import ChildServer
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment

GATEWAY = "gateway"
WAYS = (GATEWAY, "naive", "clamped")
SETTLE_S = 1.5
"""Pause after which vLLM has updated its counters."""


@dataclass(frozen=True)
class WayCost:
    """Median times of the repeats of one way and one n, and the growth of vLLM's counters in the last repeat."""

    timing: Timing
    spent: VLLMCounters


@dataclass(frozen=True)
class GatewayRow:
    n: int
    costs: Mapping[str, WayCost]

    @property
    def broken(self) -> list[str]:
        transfers = self.costs[GATEWAY].spent.transfers
        return [] if transfers == 1 else [f"n={self.n}: {transfers} transfers, not 1"]

    def ratio(self, way: str) -> float:
        """Returns the way's total time divided by the gateway's."""
        return self.costs[way].timing.total_s / self.costs[GATEWAY].timing.total_s

    def cells(self, way: str) -> Cells:
        timing, spent = self.costs[way].timing, self.costs[way].spent
        return [
            ("n", self.n, ""),
            ("way", way, "<"),
            ("transfers", spent.transfers, ""),
            ("MB", spent.num_bytes / 1e6, ".1f"),
            ("recomputed", spent.computed_tokens, ""),
            ("first s", timing.first_s, ".2f"),
            ("last first s", timing.last_first_s, ".2f"),
            ("total s", timing.total_s, ".2f"),
            ("total / gateway's", self.ratio(way), ".2f"),
        ]


async def measure(pair: VLLMPair, gateway: str, arguments: argparse.Namespace) -> list[GatewayRow]:
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(open_client(gateway))
        await stack.enter_async_context(pair.prefill)
        await stack.enter_async_context(pair.decode)
        loads = {
            GATEWAY: TimedLoad(front, arguments.max_tokens, count_blocks=False, seeded=False),
            "naive": direct(pair, arguments.max_tokens, once=False),
            "clamped": direct(pair, arguments.max_tokens, once=True),
        }
        fresh = FreshPrompts(await loads[GATEWAY].tokens_of(TEXT), seed=new_seed())
        for load in loads.values():
            await load.group(fresh.next(arguments.prompt_tokens), 2, seed=0)  # warm-up
        rows = []
        for n in arguments.ns:
            rows.append(GatewayRow(n, await costs_of(n, pair, loads, fresh, arguments)))
            progress(f"n = {n}: " + ", ".join(f"{way} {rows[-1].costs[way].timing.total_s:.2f} s" for way in WAYS))
        return rows


def direct(pair: VLLMPair, max_tokens: int, *, once: bool) -> TimedLoad:
    """Returns a load for the two servers without a gateway. `once` requests only one choice from the prefill server."""
    prepare = pair.prepare_once if once else pair.prepare
    return TimedLoad(pair.decode, max_tokens, prepare=prepare, count_blocks=False, seeded=False)


async def costs_of(
    n: int, pair: VLLMPair, loads: Mapping[str, TimedLoad], fresh: FreshPrompts, arguments: argparse.Namespace
) -> dict[str, WayCost]:
    timings: dict[str, list[Timing]] = {way: [] for way in loads}
    spent = {}
    for repeat in range(arguments.repeats):
        for way, load in loads.items():
            before = await pair.counters()
            timings[way].append(await load.group(fresh.next(arguments.prompt_tokens), n, seed=repeat))
            await asyncio.sleep(SETTLE_S)
            spent[way] = await pair.counters() - before
    return {way: WayCost(median_timing(timings[way]), spent[way]) for way in loads}


def table_of(rows: Sequence[GatewayRow]) -> Table:
    return table(row.cells(way) for row in rows for way in row.costs)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.vllm_pd", __doc__, ns=(1, 3, 8, 32), prompt_tokens=1200, max_tokens=64, repeats=3)
    parser.add_argument("--vllm", type=Path, metavar="VENV", required=True, help="virtual environment with vLLM")
    parser.add_argument("--block-size", type=int, help="tokens of a KV block (default: vLLM's own, 128 on a CPU)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions = machine()
    model = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
    blocks = () if arguments.block_size is None else ("--block-size", str(arguments.block_size))
    with vllm_pair(arguments.vllm, model, blocks) as pair:
        workers = ("--worker", f"{pair.prefill.base_url},prefill", "--worker", f"{pair.decode.base_url},decode")
        own = ("--tokenizer", str(model), "--bypass-tokens", "0", "--worker-timeout", "30")
        with ChildServer([*workers, *own], command="gateway") as gateway:
            rows = asyncio.run(measure(pair, gateway.url, arguments))
    broken = [line for row in rows for line in row.broken]
    record = {"rows": [asdict(row) for row in rows], "broken": broken}
    print_report(record, table_of(rows), *(f"BROKEN {line}" for line in broken), conditions=conditions)

    return 1 if arguments.check and broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
