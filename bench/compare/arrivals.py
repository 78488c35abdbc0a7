"""Sends requests like users do, whether or not the server keeps up: the same arrivals at two servers.

Arrivals are a Poisson process (exponential gaps). Times count from when a request was due, so no figure is better
because the client was late, when the server took its cores.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.client.prompts import FreshPrompts
from bench.program.command_line import progress
from bench.servers.compared_server import ComparedServer, FigurePair, FiguresByName
from motet.errors import EngineError


@dataclass(frozen=True)
class Mix:
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
class Outcome:
    """The times of one request, in seconds since it was due."""

    first_s: float
    last_first_s: float
    total_s: float
    tokens: int


@dataclass(frozen=True)
class Play:
    """The result of a schedule on one server."""

    outcomes: Sequence[Outcome | None]
    """One for each request; None for a request that failed."""
    span_s: float
    """Time from the start of the schedule to the end of the last answer."""
    peak_mib: float | None


def schedule(rate: float, duration_s: float, mix: Mix, *, seed: int) -> list[Arrival]:
    """Returns `rate` arrivals a second, always the same ones for a seed."""
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
    """Plays the whole schedule on ours, on the peer, on ours ...; all repeats are one sample."""
    plays: dict[str, list[Play]] = {ours.name: [], peer.name: []}
    for _ in range(repeats):
        prompts = [fresh.next(arrival.prompt_tokens) for arrival in arrivals]
        for server in (ours, peer):
            plays[server.name].append(await play(server, arrivals, prompts))
            progress(f"{server.name}: {len(arrivals)} requests in {plays[server.name][-1].span_s:.1f} s")
    return FigurePair(figures_of(plays[ours.name]), figures_of(plays[peer.name]))


async def play(server: ComparedServer, arrivals: Sequence[Arrival], prompts: Sequence[list[int]]) -> Play:
    loop = asyncio.get_running_loop()
    server.reset_peak()
    start_s = loop.time()
    async with asyncio.TaskGroup() as tasks:
        sent = []
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            await asyncio.sleep(start_s + arrival.due_s - loop.time())
            sent.append(tasks.create_task(ask(server, arrival, prompt, due_s=start_s + arrival.due_s)))
    return Play([task.result() for task in sent], loop.time() - start_s, server.peak_mib())


async def ask(server: ComparedServer, arrival: Arrival, prompt: list[int], *, due_s: float) -> Outcome | None:
    late_s = asyncio.get_running_loop().time() - due_s
    try:
        timing = await server.load(arrival.max_tokens).group(prompt, arrival.n, seed=arrival.seed)
    except (EngineError, OSError) as error:
        progress(f"{server.name}: {arrival} failed: {error!r}")
        return None
    return Outcome(late_s + timing.first_s, late_s + timing.last_first_s, late_s + timing.total_s, timing.tokens)


def figures_of(plays: Sequence[Play]) -> FiguresByName:
    outcomes = [outcome for play in plays for outcome in play.outcomes]
    answered = [outcome for outcome in outcomes if outcome is not None]
    figures: dict[str, float | None] = {
        "tokens_per_s": sum(outcome.tokens for outcome in answered) / sum(play.span_s for play in plays),
        "requests": float(len(outcomes)),
        "failed": float(len(outcomes) - len(answered)),
        "peak_mib": max((play.peak_mib for play in plays if play.peak_mib is not None), default=None),
    }
    for percent in (50, 99):
        figures[f"first_p{percent}_s"] = percentile([outcome.first_s for outcome in answered], percent)
        figures[f"last_first_p{percent}_s"] = percentile([outcome.last_first_s for outcome in answered], percent)
        figures[f"total_p{percent}_s"] = percentile([outcome.total_s for outcome in answered], percent)
    return figures


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Returns the smallest value that `percent` % of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[math.ceil(percent / 100 * len(ranked)) - 1] if ranked else None
