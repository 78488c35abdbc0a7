"""Measures the transfer of a prompt's KV from a prefill process to a decode process.

    pull       a prompt for n = 1, 3, 8, 32: transfers, bytes, descriptors, milliseconds, GB/s, compared with a plain
               copy of the same number of bytes in memory
    busy       pulls while the prefill process computes a long prompt: they must not wait for the end of its pass
    idle       CPU time of both processes without requests

Everything is measured for each transport: Motet's shared memory, NIXL over shared memory, which is the default on one
machine with NIXL, and NIXL over TCP, as between machines. Prints a table, and JSON on the last line.

Run: python -m bench.transfer [--ns 1,8] [--repeats 5] [--prompt-tokens 1200] [--model MODEL]
"""

import argparse
import asyncio
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

import msgspec
import psutil
import torch

from bench.client.load import load_parser
from bench.program.command_line import progress
from bench.program.report import Cells, machine, print_report, table
from motet.engine_orders import Connect
from motet.engines.native.client import NativeEngine
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.engine_config import EngineConfig
from motet.settings.server_config import cache_folder, environment
from motet.types import GenerateRequest, Role, SamplingParams, choice_starts

WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "shared memory": ("shared-memory", {}),
    "NIXL": ("nixl", {}),
    "NIXL over TCP": ("nixl", {"UCX_TLS": "tcp"}),
}
"""The backend, and the UCX variables in the environment of the engine processes, for each way."""
LONG_PROMPT = 4000
GB = 1e9


@dataclass(frozen=True)
class PullCost:
    """Medians of the repeats for one n."""

    n: int
    transfers: float
    num_bytes: int
    trunk_bytes: int
    descriptors: float
    milliseconds: float
    recomputed_tokens: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.milliseconds * 1000 / GB

    def cells(self, way: str, copy: float) -> Cells:
        return [
            ("way", way, "<"),
            ("n", self.n, ""),
            ("transfers", self.transfers, "g"),
            ("MB", self.num_bytes / 1e6, ".1f"),
            ("/ trunk", self.num_bytes / self.trunk_bytes, ".2f"),
            ("descriptors", self.descriptors, "g"),
            ("ms", self.milliseconds, ".1f"),
            ("GB/s", self.gb_per_s, ".1f"),
            ("/ copy", self.gb_per_s / copy, ".2f"),
            ("recomputed", self.recomputed_tokens, "g"),
        ]


@dataclass(frozen=True)
class TransferWay:
    """The results for one way to transfer bytes."""

    name: str
    pulls: Sequence[PullCost]
    busy_ms: float
    """Time of a pull while the prefill process computes a long prompt."""
    pass_ms: float
    """Time of one forward pass of that prompt."""
    idle_percent: dict[str, float]
    """Share of one core in percent that each idle process takes."""


class TransferRequests:
    """Makes requests with prompts that are not cached."""

    def __init__(self, vocab_size: int) -> None:
        self._dice = random.Random(0)
        self._vocab_size = vocab_size
        self._names = map(str, itertools.count())

    def next(self, length: int, *, n: int = 1, max_tokens: int = 2) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId(next(self._names)),
            prompt=tuple(self._dice.randrange(self._vocab_size) for _ in range(length)),
            choices=choice_starts(n, 0),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )


@dataclass(frozen=True)
class EnginePair:
    prefill: NativeEngine
    decode: NativeEngine

    async def pull(self, request: GenerateRequest) -> EngineStats:
        """Prefills and decodes one group, and returns what the decode engine counted for it."""
        before = await self.decode.stats()
        ticket = await self.prefill.prefill(request)
        async for _ in self.decode.generate(msgspec.structs.replace(request, ticket=ticket)):
            pass
        return minus(await self.decode.stats(), before)


async def measure_way(name: str, model: Path, arguments: argparse.Namespace) -> TransferWay:
    config = EngineConfig(
        model_path=str(model),
        model_name="bench",
        kv_cache_gb=arguments.kv_cache_gb,
        num_threads=1,
        kv_transfer_backend=WAYS[name][0],
    )
    roles = (Role.PREFILL, Role.DECODE)
    engines = await asyncio.gather(*(NativeEngine.start(replace(config, role=role)) for role in roles))
    pair = EnginePair(*engines)
    try:
        if (address := pair.prefill.info.transfer) is None:
            raise RuntimeError("the prefill engine has no side channel")
        await pair.decode.send(Connect(address))
        requests = TransferRequests(pair.prefill.info.vocab_size)
        await pair.pull(requests.next(arguments.prompt_tokens))  # warm-up: memory is used for the first time
        pulls = [await measure_n(pair, requests, n, arguments) for n in arguments.ns]
        busy_ms, pass_ms = await measure_busy(pair, requests, arguments)
        return TransferWay(name, pulls, busy_ms, pass_ms, await measure_idle(pair, arguments))
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


async def measure_n(pair: EnginePair, requests: TransferRequests, n: int, arguments: argparse.Namespace) -> PullCost:
    spent = [await pair.pull(requests.next(arguments.prompt_tokens, n=n)) for _ in range(arguments.repeats)]
    info = pair.decode.info
    return PullCost(
        n=n,
        transfers=median(stats.transfers for stats in spent),
        num_bytes=int(median(stats.transfer_bytes for stats in spent)),
        trunk_bytes=-(-(arguments.prompt_tokens - 1) // info.block_size) * info.bytes_per_block,
        descriptors=median(stats.transfer_descriptors for stats in spent),
        milliseconds=1000 * median(stats.transfer_seconds_sum for stats in spent),
        recomputed_tokens=median(stats.recomputed_tokens for stats in spent),
    )


async def measure_busy(
    pair: EnginePair, requests: TransferRequests, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Returns milliseconds of a pull during a long prefill, and milliseconds of one pass of this prefill."""
    milliseconds, passes = [], []
    for _ in range(arguments.repeats):
        request = requests.next(arguments.prompt_tokens)
        ticket = await pair.prefill.prefill(request)
        before, steps, start = await pair.decode.stats(), (await pair.prefill.stats()).steps, time.monotonic()
        length = min(LONG_PROMPT, pair.prefill.info.max_model_len - 1)
        long = asyncio.create_task(pair.prefill.prefill(requests.next(length)))
        await pair.prefill.stats()  # answered between two steps: the long prompt has started
        async for _ in pair.decode.generate(msgspec.structs.replace(request, ticket=ticket)):
            pass
        milliseconds.append(1000 * minus(await pair.decode.stats(), before).transfer_seconds_sum)
        await pair.prefill.release(await long)
        passes.append(1000 * (time.monotonic() - start) / ((await pair.prefill.stats()).steps - steps))
    return median(milliseconds), median(passes)


async def measure_idle(pair: EnginePair, arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the share of a core in percent that each idle process takes."""
    idle_s: float = arguments.idle
    engines = {"prefill": pair.prefill, "decode": pair.decode}
    processes = {name: psutil.Process(engine.info.pid) for name, engine in engines.items()}
    await asyncio.sleep(arguments.settle)
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    await asyncio.sleep(idle_s)
    return {name: 100 * (sum(process.cpu_times()[:2]) - before[name]) / idle_s for name, process in processes.items()}


def minus(later: EngineStats, earlier: EngineStats) -> EngineStats:
    """Returns the difference of the counters that the benchmark uses."""
    names = ("transfers", "transfer_bytes", "transfer_descriptors", "recomputed_tokens", "transfer_seconds_sum")
    return EngineStats(**{name: getattr(later, name) - getattr(earlier, name) for name in names})


def copy_gb_per_s(num_bytes: int, repeats: int) -> float:
    """Returns the rate of a plain copy in memory by one thread, of memory that was used before."""
    torch.set_num_threads(1)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(max(3, repeats)):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return num_bytes / median(seconds) / GB


def lines_of(ways: Sequence[TransferWay], copy: float) -> Iterator[str]:
    yield f"a plain copy in memory: {copy:.1f} GB/s"
    for way in ways:
        idle = ", ".join(f"{name} {percent:.1f} %" for name, percent in way.idle_percent.items())
        busy = f"during a long prefill {way.busy_ms:.1f} ms (one pass {way.pass_ms:.0f} ms)"
        yield f"{way.name}: {busy}; idle: {idle} of a core"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.transfer", __doc__, ns=(1, 3, 8, 32), prompt_tokens=1200, repeats=5)
    parser.add_argument("--kv-cache-gb", type=float, default=1.0, help="GiB of KV in each process")
    # A process polls in short intervals for two seconds after the last message of a reader.
    parser.add_argument(
        "--settle", type=float, default=3.0, help="pause before idle processes are measured, in seconds"
    )
    parser.add_argument("--idle", type=float, default=5.0, help="seconds for which idle processes are measured")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions = machine()
    model = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
    ways = []
    for name, (_, variables) in WAYS.items():
        with mock.patch.dict(os.environ, variables):  # noqa: TID251  the engine processes inherit it
            ways.append(asyncio.run(measure_way(name, model, arguments)))
    copy = copy_gb_per_s(ways[0].pulls[0].num_bytes, arguments.repeats)
    record = {"copy_gb_per_s": copy, "ways": [asdict(way) for way in ways]}
    shown = table(pulls.cells(way.name, copy) for way in ways for pulls in way.pulls)
    print_report(record, shown, *lines_of(ways, copy), conditions=conditions)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
