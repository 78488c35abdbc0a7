"""Sends requests as independent users do, whether or not the server keeps up: the same arrivals at two servers.

Arrivals are a Poisson process (exponential gaps). Times count from the moment when a request was due, so a figure is
not better if the client was late because the server used all cores.
"""

import asyncio
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.client.fresh_prompts import FreshPrompts
from bench.program.command_line import progress
from bench.program.report import LEFT, Cells
from bench.servers.compared_server import ComparedServer, FigurePair, FiguresByName
from motet.errors import EngineError

RATE_LINES = {
    "tokens_per_s": ("tokens/s", 0),
    "first_p50_s": ("first token, p50 s", 2),
    "first_p99_s": ("first token, p99 s", 2),
    "last_first_p50_s": ("last first token, p50 s", 2),
    "last_first_p99_s": ("last first token, p99 s", 2),
    "total_p50_s": ("total, p50 s", 2),
    "total_p99_s": ("total, p99 s", 2),
    "requests": ("requests", 0),
    "failed": ("failed", 0),
    "peak_mib": ("peak MiB", 0),
}


@dataclass(frozen=True)
class RequestMix:
    """The kinds of requests that arrive."""

    ns: Mapping[int, float]
    """The weight of each n."""
    prompt_tokens: tuple[int, ...]
    max_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Arrival:
    due_s: float
    n: int
    prompt_tokens: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class RequestTimes:
    """Times of one request, in seconds since it was due."""

    first_s: float
    last_first_s: float
    total_s: float
    tokens: int


@dataclass(frozen=True)
class ScheduleRun:
    """Result of a schedule on one server."""

    requests: Sequence[RequestTimes | None]
    """Times of each request. None for a request that failed."""
    span_s: float
    """Time from the start of the schedule to the end of the last answer."""
    peak_mib: float | None


def schedule(rate: float, duration_s: float, mix: RequestMix, *, seed: int) -> list[Arrival]:
    """Returns `rate` arrivals per second, always the same for one seed."""
    dice, due_s = random.Random(seed), 0.0
    arrivals: list[Arrival] = []
    while (due_s := due_s + dice.expovariate(rate)) < duration_s:
        (n,) = dice.choices([*mix.ns], [*mix.ns.values()])
        prompt_tokens, max_tokens = dice.choice(mix.prompt_tokens), dice.choice(mix.max_tokens)
        arrivals.append(Arrival(due_s, n, prompt_tokens, max_tokens, dice.getrandbits(31)))
    return arrivals


async def measure_rate(
    ours: ComparedServer, peer: ComparedServer, arrivals: Sequence[Arrival], *, repeats: int, fresh: FreshPrompts
) -> FigurePair:
    """Runs the complete schedule on Motet, on the peer, on Motet and so on. All repeats are one sample."""
    runs: dict[str, list[ScheduleRun]] = {ours.name: [], peer.name: []}
    for _ in range(repeats):
        prompts = [fresh.next(arrival.prompt_tokens) for arrival in arrivals]
        for server in (ours, peer):
            runs[server.name].append(await run_schedule(server, arrivals, prompts))
            progress(f"{server.name}: {len(arrivals)} requests in {runs[server.name][-1].span_s:.1f} s")
    return FigurePair(figures_of(runs[ours.name]), figures_of(runs[peer.name]))


async def run_schedule(
    server: ComparedServer, arrivals: Sequence[Arrival], prompts: Sequence[list[int]]
) -> ScheduleRun:
    loop = asyncio.get_running_loop()
    server.reset_peak()
    start_s = loop.time()
    async with asyncio.TaskGroup() as tasks:
        sent = []
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            await asyncio.sleep(start_s + arrival.due_s - loop.time())
            sent.append(tasks.create_task(send(server, arrival, prompt, due_s=start_s + arrival.due_s)))
    return ScheduleRun([task.result() for task in sent], loop.time() - start_s, server.peak_mib())


async def send(server: ComparedServer, arrival: Arrival, prompt: list[int], *, due_s: float) -> RequestTimes | None:
    late_s = asyncio.get_running_loop().time() - due_s
    try:
        timing = await server.load(arrival.max_tokens).group(prompt, arrival.n, seed=arrival.seed)
    except (EngineError, OSError) as error:
        progress(f"{server.name}: {arrival} failed: {error!r}")
        return None
    return RequestTimes(late_s + timing.first_s, late_s + timing.last_first_s, late_s + timing.total_s, timing.tokens)


def figures_of(runs: Sequence[ScheduleRun]) -> FiguresByName:
    requests = [request for run in runs for request in run.requests]
    answered = [request for request in requests if request is not None]
    figures: dict[str, float | None] = {
        "tokens_per_s": sum(request.tokens for request in answered) / sum(run.span_s for run in runs),
        "requests": float(len(requests)),
        "failed": float(len(requests) - len(answered)),
        "peak_mib": max((run.peak_mib for run in runs if run.peak_mib is not None), default=None),
    }
    for percent in (50, 99):
        figures[f"first_p{percent}_s"] = percentile([request.first_s for request in answered], percent)
        figures[f"last_first_p{percent}_s"] = percentile([request.last_first_s for request in answered], percent)
        figures[f"total_p{percent}_s"] = percentile([request.total_s for request in answered], percent)
    return figures


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Returns the smallest value that is not exceeded by `percent` % of the values (nearest rank)."""
    ranked = sorted(values)
    return ranked[math.ceil(percent / 100 * len(ranked)) - 1] if ranked else None


def rate_cells(pair: FigurePair) -> Iterator[Cells]:
    """Yields a row for each figure."""
    for name, (heading, digits) in RATE_LINES.items():
        yield [("", heading, LEFT), ("ours / peer", pair.text(name, digits), ""), ("ratio", pair.ratio(name), ".2f")]
