"""Conditions and table rows of a comparison."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.compare.grid import GridRow
from bench.program.report import LEFT, Cells
from bench.servers.compared_server import FigurePair, rounded

GRID_COLUMNS = {
    "first_s": ("first s", 2),
    "last_first_s": ("last first s", 2),
    "total_s": ("total s", 2),
    "decode_tokens_per_s": ("tokens/s", 0),
    "peak_mib": ("peak MiB", 0),
}
"""Heading and number of decimals of each figure."""
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
class ServerFacts:
    url: str
    model: str
    version: str
    idle_percent: float | None
    """Share of one core in percent that the idle server takes. None if its processes cannot be seen."""

    def __str__(self) -> str:
        return f"{self.model} at {self.url}, version {self.version}, idle {rounded(self.idle_percent, 1)} % of a core"


@dataclass(frozen=True)
class ComparisonConditions:
    """Machine, servers and load of a comparison. Figures mean nothing without them."""

    machine: Mapping[str, str]
    ours: ServerFacts
    peer: ServerFacts
    repeats: int
    seed: int
    """Seed of the prompts and the schedule."""

    @property
    def printed(self) -> dict[str, str]:
        return {**self.machine, "ours": str(self.ours), "peer": str(self.peer), "repeats": str(self.repeats)}


def grid_cells(row: GridRow) -> Cells:
    """Returns the row of one shape of requests."""
    cells: list[tuple[str, object, str]] = [
        ("prompt", row.shape.prompt_tokens, ""),
        ("tokens", row.shape.max_tokens, ""),
        ("n", row.shape.n, ""),
    ]
    for name, (heading, digits) in GRID_COLUMNS.items():
        cells += [
            (f"{heading}\nours / peer", row.pair.text(name, digits), ""),
            ("\nratio", row.pair.ratio(name), ".2f"),
        ]
    return cells


def rate_cells(pair: FigurePair) -> Iterator[Cells]:
    """Yields a row for each figure."""
    for name, (heading, digits) in RATE_LINES.items():
        yield [("", heading, LEFT), ("ours / peer", pair.text(name, digits), ""), ("ratio", pair.ratio(name), ".2f")]
