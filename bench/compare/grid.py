"""Sends one request at a time to two servers in turn, for every n, length of the prompt and length of the answers."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.client.prompts import FreshPrompts
from bench.program.command_line import progress
from bench.program.report import Bound, Floor
from bench.servers.compared_server import ComparedServer, FigurePair, FiguresByName, TimedSample, median_sample
from motet.errors import EngineError

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Cell:
    """One kind of request."""

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

    def cells(self) -> Iterator[Cell]:
        return itertools.starmap(Cell, itertools.product(self.prompt_tokens, self.max_tokens, self.ns))


FLOOR_PROMPT, FLOOR_TOKENS, FLOOR_NS = 1340, 64, (1, 8, 32)
QUICK = Grid((FLOOR_PROMPT,), (FLOOR_TOKENS,), FLOOR_NS)
"""The cells that have floors."""


@dataclass(frozen=True)
class Row:
    cell: Cell
    versus: FigurePair


@dataclass(frozen=True)
class GridBench:
    ours: ComparedServer
    peer: ComparedServer
    repeats: int
    fresh: FreshPrompts

    async def warm_up(self, grid: Grid) -> None:
        """Sends each shape of request once, so that no first request of its shape is timed."""
        for prompt_tokens in grid.prompt_tokens:
            await self._both(Cell(prompt_tokens, WARM_UP_TOKENS, max(grid.ns)), seed=0)

    async def measure(self, grid: Grid) -> list[Row]:
        return [await self._row(cell) for cell in grid.cells()]

    async def _row(self, cell: Cell) -> Row:
        """Measures ours, peer, ours, peer ..., so that other load on the machine affects both."""
        pairs = [await self._both(cell, seed=repeat) for repeat in range(self.repeats)]
        versus = FigurePair(figures_of([ours for ours, _ in pairs]), figures_of([peer for _, peer in pairs]))
        progress(f"{cell}: total {versus.text('total_s', 2)} s")
        return Row(cell, versus)

    async def _both(self, cell: Cell, *, seed: int) -> tuple[TimedSample | None, TimedSample | None]:
        """Sends the same prompt to both servers."""
        prompt = self.fresh.next(cell.prompt_tokens)
        return await attempt(self.ours, prompt, cell, seed=seed), await attempt(self.peer, prompt, cell, seed=seed)


async def attempt(server: ComparedServer, prompt: list[int], cell: Cell, *, seed: int) -> TimedSample | None:
    """Times one request. Returns None if it fails, so that the comparison goes on."""
    try:
        return await server.timed([prompt], cell.n, max_tokens=cell.max_tokens, seed=seed)
    except (EngineError, OSError) as error:
        progress(f"{cell}: {server.name} failed: {error!r}")
        return None


def figures_of(samples: Sequence[TimedSample | None]) -> FiguresByName:
    """Returns the figures of the typical request; none if one of the requests failed."""
    whole = [sample for sample in samples if sample is not None]
    if len(whole) < len(samples):
        return {}
    typical = median_sample(whole)
    return {
        "first_s": typical.timing.first_s,
        "last_first_s": typical.timing.last_first_s,
        "total_s": typical.timing.total_s,
        "decode_tokens_per_s": typical.timing.decode_tokens_per_s,
        "peak_mib": typical.peak_mib,
    }


def floors(rows: Sequence[Row]) -> list[Floor]:
    """Returns what Motet promises against vLLM 0.32 on two cores."""
    at = {row.cell.n: row.versus for row in rows if row.cell in set(QUICK.cells())}
    nothing = FigurePair({}, {})
    one, eight, many = (at.get(n, nothing) for n in FLOOR_NS)
    ours_alone = FigurePair(many.ours, one.ours).ratio("last_first_s")
    return [
        Floor("decode tokens/s of peer's, n=1", one.ratio("decode_tokens_per_s"), 1.2, Bound.AT_LEAST),
        Floor("decode tokens/s of peer's, n=8", eight.ratio("decode_tokens_per_s"), 1.4, Bound.AT_LEAST),
        Floor("decode tokens/s of peer's, n=32", many.ratio("decode_tokens_per_s"), 1.4, Bound.AT_LEAST),
        Floor("last first token of peer's, n=32", many.ratio("last_first_s"), 0.5),
        Floor("last first token of our own at n=1, n=32", ours_alone, 1.1),
        Floor("total of peer's, n=32", many.ratio("total_s"), 0.65),
    ]
