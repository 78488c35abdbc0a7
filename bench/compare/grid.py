"""Sends one request at a time to two servers in turn, for every n, length of prompts and length of answers."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.client.fresh_prompts import FreshPrompts
from bench.program.command_line import progress
from bench.program.report import Bound, Cells, Target
from bench.servers.compared_server import ComparedServer, FigurePair, FiguresByName, TimedSample, median_sample
from motet.errors import EngineError

WARM_UP_TOKENS = 8
GRID_COLUMNS = {
    "first_s": ("first s", 2),
    "last_first_s": ("last first s", 2),
    "total_s": ("total s", 2),
    "decode_tokens_per_s": ("tokens/s", 0),
    "peak_mib": ("peak MiB", 0),
}
"""Heading and number of decimals of each figure."""


@dataclass(frozen=True)
class RequestShape:
    """The size of a request."""

    prompt_tokens: int
    max_tokens: int
    n: int

    def __str__(self) -> str:
        return f"prompt {self.prompt_tokens}, {self.max_tokens} tokens, n = {self.n}"


@dataclass(frozen=True)
class Grid:
    prompt_tokens: tuple[int, ...] = (140, 1340, 3500)
    max_tokens: tuple[int, ...] = (64, 256)
    ns: tuple[int, ...] = (1, 8, 32, 64)

    def shapes(self) -> Iterator[RequestShape]:
        return itertools.starmap(RequestShape, itertools.product(self.prompt_tokens, self.max_tokens, self.ns))


TARGET_PROMPT, TARGET_TOKENS, TARGET_NS = 1340, 64, (1, 8, 32)
QUICK = Grid((TARGET_PROMPT,), (TARGET_TOKENS,), TARGET_NS)
"""The shapes that have targets."""


@dataclass(frozen=True)
class GridRow:
    shape: RequestShape
    pair: FigurePair

    def cells(self) -> Cells:
        cells: list[tuple[str, object, str]] = [
            ("prompt", self.shape.prompt_tokens, ""),
            ("tokens", self.shape.max_tokens, ""),
            ("n", self.shape.n, ""),
        ]
        for name, (heading, digits) in GRID_COLUMNS.items():
            cells += [
                (f"{heading}\nours / peer", self.pair.text(name, digits), ""),
                ("\nratio", self.pair.ratio(name), ".2f"),
            ]
        return cells


@dataclass(frozen=True)
class GridBench:
    ours: ComparedServer
    peer: ComparedServer
    repeats: int
    fresh: FreshPrompts

    async def warm_up(self, grid: Grid) -> None:
        """Sends a request for each length of prompts, so that the first such request is not timed."""
        for prompt_tokens in grid.prompt_tokens:
            await self._both(RequestShape(prompt_tokens, WARM_UP_TOKENS, max(grid.ns)), seed=0)

    async def measure(self, grid: Grid) -> list[GridRow]:
        return [await self._row(shape) for shape in grid.shapes()]

    async def _row(self, shape: RequestShape) -> GridRow:
        """Measures Motet, peer, Motet, peer and so on, so that other load on the machine affects both."""
        samples = [await self._both(shape, seed=repeat) for repeat in range(self.repeats)]
        pair = FigurePair(figures_of([ours for ours, _ in samples]), figures_of([peer for _, peer in samples]))
        progress(f"{shape}: total {pair.text('total_s', 2)} s")
        return GridRow(shape, pair)

    async def _both(self, shape: RequestShape, *, seed: int) -> tuple[TimedSample | None, TimedSample | None]:
        """Sends the same prompt to both servers."""
        prompt = self.fresh.next(shape.prompt_tokens)
        return await attempt(self.ours, prompt, shape, seed=seed), await attempt(self.peer, prompt, shape, seed=seed)


async def attempt(server: ComparedServer, prompt: list[int], shape: RequestShape, *, seed: int) -> TimedSample | None:
    """Times one request. Returns None if it fails, so that the comparison continues."""
    try:
        return await server.timed([prompt], shape.n, max_tokens=shape.max_tokens, seed=seed)
    except (EngineError, OSError) as error:
        progress(f"{shape}: {server.name} failed: {error!r}")
        return None


def figures_of(samples: Sequence[TimedSample | None]) -> FiguresByName:
    """Returns the figures of the median request. Returns no figures if one of the requests failed."""
    complete = [sample for sample in samples if sample is not None]
    if len(complete) < len(samples):
        return {}
    typical = median_sample(complete)
    return {
        "first_s": typical.timing.first_s,
        "last_first_s": typical.timing.last_first_s,
        "total_s": typical.timing.total_s,
        "decode_tokens_per_s": typical.timing.decode_tokens_per_s,
        "peak_mib": typical.peak_mib,
    }


def targets(rows: Sequence[GridRow]) -> list[Target]:
    """Returns the targets for Motet against vLLM 0.32 on two cores."""
    at = {row.shape.n: row.pair for row in rows if row.shape in set(QUICK.shapes())}
    nothing = FigurePair({}, {})
    one, eight, many = (at.get(n, nothing) for n in TARGET_NS)
    own_growth = FigurePair(many.ours, one.ours).ratio("last_first_s")
    return [
        Target("decode tokens/s / peer's, n=1", one.ratio("decode_tokens_per_s"), 1.2, Bound.AT_LEAST),
        Target("decode tokens/s / peer's, n=8", eight.ratio("decode_tokens_per_s"), 1.4, Bound.AT_LEAST),
        Target("decode tokens/s / peer's, n=32", many.ratio("decode_tokens_per_s"), 1.4, Bound.AT_LEAST),
        Target("last first token / peer's, n=32", many.ratio("last_first_s"), 0.5),
        Target("last first token, n=32 / Motet's at n=1", own_growth, 1.1),
        Target("total / peer's, n=32", many.ratio("total_s"), 0.65),
    ]
