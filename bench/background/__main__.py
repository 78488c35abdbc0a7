"""Measures how a running batch (`--batch-dir`) affects the latency of a client: the time to the first token, the time
per further token, and the lines of the batch per second.

In each round, the client sends a few requests, one after the other with a pause before each: first while a batch runs,
then after the batch has been cancelled. No prompt is cached. The first request is sent after the batch has filled the
engine. The ratio of a round is the median time to the first token with the batch divided by the median without it, and
the ratio of the measurement is the median of all rounds.

Target (`--check` fails if it is missed): a ratio of at most 1.2.

Run: python -m bench.background [--prompt-tokens 256] [--line-tokens 256] [--rounds 5] [--requests 10] [--check]
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import httpx
import msgspec

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import PATH, TimedLoad, load_parser, open_client
from bench.program.command_line import progress
from bench.program.report import Cells, Target, machine, print_report, table
from bench.servers.motet_server import motet_server

MAX_RATIO = 1.2
LINES = 2_000
"""Number of lines of a batch, more than complete in a round."""
PAUSE_S, FILL_S = 0.3, 3.0
"""Pause before each request, and between the start of a batch and the first request, in seconds."""


class _Id(msgspec.Struct):
    id: str


class _Counts(msgspec.Struct):
    completed: int


class _BatchState(msgspec.Struct):
    status: str
    request_counts: _Counts


@dataclass(frozen=True)
class MedianTimes:
    """Median times of some requests in milliseconds."""

    first_ms: float
    """Time to the first token."""
    token_ms: float
    """Time for each further token."""


@dataclass(frozen=True)
class Round:
    with_batch: MedianTimes
    alone: MedianTimes
    lines_per_s: float

    @property
    def ratio(self) -> float:
        return self.with_batch.first_ms / self.alone.first_ms

    def cells(self, number: int) -> Cells:
        return [
            ("round", number, ""),
            ("first token ms, alone", self.alone.first_ms, ".1f"),
            ("next to a batch", self.with_batch.first_ms, ".1f"),
            ("ratio", self.ratio, ".2f"),
            ("ms/token, alone", self.alone.token_ms, ".1f"),
            ("next to it", self.with_batch.token_ms, ".1f"),
            ("lines/s", self.lines_per_s, ".2f"),
        ]


@dataclass(frozen=True)
class BackgroundSetup:
    prompt_tokens: int
    max_tokens: int
    line_tokens: int
    line_max_tokens: int
    requests: int


class Batches:
    """Starts and cancels batches of completions, one at a time."""

    def __init__(self, client: httpx.AsyncClient, fresh: FreshPrompts, setup: BackgroundSetup) -> None:
        self._client = client
        self._fresh = fresh
        self._setup = setup
        self._id = ""

    async def start(self) -> None:
        lines = b"\n".join(self._line(number) for number in range(LINES))
        form = {"file": ("lines.jsonl", lines)}
        uploaded = await self._client.post("/v1/files", files=form, data={"purpose": "batch"})
        file = msgspec.json.decode(uploaded.raise_for_status().content, type=_Id)
        body = {"input_file_id": file.id, "endpoint": PATH, "completion_window": "24h"}
        created = await self._client.post("/v1/batches", json=body)
        self._id = msgspec.json.decode(created.raise_for_status().content, type=_Id).id
        while (await self.state()).status == "validating":  # noqa: ASYNC110  the server sends no event
            await asyncio.sleep(0.1)

    def _line(self, number: int) -> bytes:
        prompt = self._fresh.next(self._setup.line_tokens)
        body = {"prompt": prompt, "max_tokens": self._setup.line_max_tokens, "ignore_eos": True}
        return msgspec.json.encode({"custom_id": str(number), "method": "POST", "url": PATH, "body": body})

    async def state(self) -> _BatchState:
        answer = await self._client.get(f"/v1/batches/{self._id}")
        return msgspec.json.decode(answer.raise_for_status().content, type=_BatchState)

    async def cancel(self) -> None:
        (await self._client.post(f"/v1/batches/{self._id}/cancel")).raise_for_status()
        while (await self.state()).status != "cancelled":  # noqa: ASYNC110  the server sends no event
            await asyncio.sleep(0.1)


async def measure(url: str, setup: BackgroundSetup, *, rounds: int) -> list[Round]:
    async with open_client(url) as client:
        load = TimedLoad(client, setup.max_tokens, count_blocks=False)
        fresh = FreshPrompts(await load.tokens_of(TEXT), seed=new_seed())
        batches, found = Batches(client, fresh, setup), []
        await median_times(load, fresh, setup)  # warm-up
        for number in range(rounds):
            await batches.start()
            await asyncio.sleep(FILL_S)
            before, started_s = await batches.state(), time.monotonic()
            with_batch = await median_times(load, fresh, setup)
            after, seconds = await batches.state(), time.monotonic() - started_s
            await batches.cancel()
            alone = await median_times(load, fresh, setup)
            lines = after.request_counts.completed - before.request_counts.completed
            found.append(Round(with_batch, alone, lines / seconds))
            progress(f"round {number}: {with_batch.first_ms:.1f} ms next to a batch, {alone.first_ms:.1f} ms alone")
        return found


async def median_times(load: TimedLoad, fresh: FreshPrompts, setup: BackgroundSetup) -> MedianTimes:
    first_ms, token_ms = [], []
    for seed in range(setup.requests):
        await asyncio.sleep(PAUSE_S)
        timing = await load.group(fresh.next(setup.prompt_tokens), 1, seed=seed)
        first_ms.append(1000 * timing.first_s)
        token_ms.append(1000 * (timing.total_s - timing.first_s) / (setup.max_tokens - 1))
    return MedianTimes(median(first_ms), median(token_ms))


def parser() -> argparse.ArgumentParser:
    found = load_parser("bench.background", __doc__, prompt_tokens=256, max_tokens=32)
    found.add_argument("--line-tokens", type=int, default=256, help="number of prompt tokens of a line")
    found.add_argument("--line-max-tokens", type=int, default=64, help="number of output tokens of a line")
    found.add_argument("--rounds", type=int, default=5, help="number of rounds")
    found.add_argument("--requests", type=int, default=10, help="number of requests of each kind in a round")
    return found


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    conditions = machine()
    setup = BackgroundSetup(
        arguments.prompt_tokens,
        arguments.max_tokens,
        arguments.line_tokens,
        arguments.line_max_tokens,
        arguments.requests,
    )
    with (
        tempfile.TemporaryDirectory(prefix="motet-bench-") as folder,
        motet_server(arguments.model, "--batch-dir", folder) as server,
    ):
        found = asyncio.run(measure(server.url, setup, rounds=arguments.rounds))
    ratio = median(each.ratio for each in found)
    return print_report(
        {"rounds": [msgspec.to_builtins(each) | {"ratio": each.ratio} for each in found]},
        table(each.cells(number) for number, each in enumerate(found)),
        conditions=conditions,
        targets=[Target("time to the first token next to a batch / alone", ratio, MAX_RATIO)],
        check=arguments.check,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
