"""Measures the gaps between the tokens of a stream, next to choices that follow schemas.

The stream and the choices are of one client, so that they do not have shares of the engine. The choices have random
texts of up to `MAX_TOKENS` tokens, and are requested again and again. Gaps count while at least one of them runs.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from statistics import mean, median

import httpx

from bench.program.report import Cells

NUM_CHOICES = 4
MAX_TOKENS = 300
STREAM: dict[str, object] = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
MESSAGES = [{"role": "user", "content": "Give me an example. Answer with JSON."}]


@dataclass(frozen=True)
class Gaps:
    """The gaps of the stream next to one kind of choices."""

    name: str
    gaps_ms: Sequence[float]

    @property
    def mean_ms(self) -> float:
        return mean(self.gaps_ms)

    def cells(self, free: "Gaps") -> Cells:
        ordered = sorted(self.gaps_ms)
        return [
            ("four choices", self.name, "<"),
            ("gaps", len(ordered), "d"),
            ("mean ms", self.mean_ms, ".1f"),
            ("ratio", self.mean_ms / free.mean_ms, ".2f"),
            ("median ms", median(ordered), ".1f"),
            ("p99 ms", ordered[int(0.99 * len(ordered))], ".1f"),
        ]


async def gaps_next_to(client: httpx.AsyncClient, schema: object | None, *, name: str, seconds: float) -> Gaps:
    """Streams next to choices that follow a schema. `schema`: None for no choices, True for free ones."""
    body: dict[str, object] = {"messages": MESSAGES, "n": NUM_CHOICES, "max_tokens": MAX_TOKENS, "temperature": 1.0}
    if schema is True:
        body["ignore_eos"] = True
    else:
        body["structured_outputs"] = {"json": schema}

    async def request_repeatedly() -> None:
        while True:
            response = await client.post("/v1/chat/completions", json=body)
            if response.status_code != HTTPStatus.BAD_REQUEST:  # else the grammar could not be followed to its end
                response.raise_for_status()

    return Gaps(name, await gaps_during(client, request_repeatedly if schema is not None else idle, seconds=seconds))


async def idle() -> None:
    await asyncio.Event().wait()


async def gaps_during(client: httpx.AsyncClient, work: Callable[[], Awaitable[None]], *, seconds: float) -> list[float]:
    """Returns the gaps in milliseconds of a stream during some work, which is cancelled at the end."""
    times: list[float] = []
    async with client.stream("POST", "/v1/completions", json=STREAM) as response:
        response.raise_for_status()
        lines = response.aiter_lines()
        await anext(lines)
        working = asyncio.ensure_future(work())
        try:
            async for line in lines:
                if line.startswith("data: {"):
                    times.append(time.monotonic())
                    if times[-1] > times[0] + seconds or working.done():
                        break
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
    return [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]


async def measure_gaps(url: str, files: Sequence[Path], *, seconds: float) -> list[Gaps]:
    """Returns the gaps next to no choices, next to free ones, and next to choices that follow each file's schema."""
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        schemas: list[tuple[str, object]] = [("none", None), ("without a schema", True)]
        for file in files:
            content = json.loads(file.read_text())
            schemas.append((file.stem, content.get("schema", content)))
        for name, schema in schemas:
            await gaps_next_to(client, schema, name=name, seconds=0.5)  # warm-up: the grammar is compiled
            found.append(await gaps_next_to(client, schema, name=name, seconds=seconds))
    return found
