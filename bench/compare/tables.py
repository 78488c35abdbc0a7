"""Shows a comparison: its conditions and its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.compare.grid import Row
from bench.program.report import Table, columns_table
from bench.servers.compared_server import FigurePair, rounded

GRID_COLUMNS = {
    "first_s": ("first s", 2),
    "last_first_s": ("last first s", 2),
    "total_s": ("total s", 2),
    "decode_tokens_per_s": ("tokens/s", 0),
    "peak_mib": ("peak MiB", 0),
}
"""Head and number of decimals of each figure."""
RATE_LINES = {
    "tokens_per_s": ("tokens/s", 0),
    "first_p50_s": ("first token, p50 s", 2),
    "first_p99_s": ("first token, p99 s", 2),
    "last_first_p50_s": ("of the last choice, p50 s", 2),
    "last_first_p99_s": ("of the last choice, p99 s", 2),
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
    """Percent of one core that the idle server takes; None where its processes cannot be seen."""

    def __str__(self) -> str:
        return f"{self.model} at {self.url}, version {self.version}, idle {rounded(self.idle_percent, 1)} % of a core"


@dataclass(frozen=True)
class Conditions:
    """Where and how figures were measured; without this they mean nothing."""

    machine: Mapping[str, str]
    ours: ServerFacts
    peer: ServerFacts
    repeats: int
    seed: int
    """Seed of the prompts and the schedule."""

    @property
    def about(self) -> dict[str, str]:
        return {**self.machine, "ours": str(self.ours), "peer": str(self.peer), "repeats": str(self.repeats)}


def grid_table(rows: Sequence[Row]) -> Table:
    heads = [("prompt", ""), ("tokens", ""), ("n", "")]
    for head, _ in GRID_COLUMNS.values():
        heads += [(f"{head}\nours / peer", ""), ("\nratio", ".2f")]
    return columns_table(heads, map(cells_of, rows))


def cells_of(row: Row) -> list[object]:
    cells: list[object] = [row.cell.prompt_tokens, row.cell.max_tokens, row.cell.n]
    for name, (_, digits) in GRID_COLUMNS.items():
        cells += [row.versus.text(name, digits), row.versus.ratio(name)]
    return cells


def rate_table(versus: FigurePair) -> Table:
    lines = [(head, versus.text(name, digits), versus.ratio(name)) for name, (head, digits) in RATE_LINES.items()]
    return columns_table([("", "<"), ("ours / peer", ""), ("ratio", ".2f")], lines)
