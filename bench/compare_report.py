"""How a comparison is told: under which conditions, a table for people, and JSON for machines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench.compare_grid import Row
from bench.compare_rate import Arrival
from bench.floor import Floor
from bench.versus import Column, Versus, add_columns, cells_of, shown

GRID_COLUMNS = (
    Column("first_s", "first s", 2),
    Column("last_first_s", "last first s", 2),
    Column("total_s", "total s", 2),
    Column("decode_tokens_per_s", "tokens/s", 0),
    Column("peak_mib", "peak MiB", 0),
)
RATE_LINES = (
    Column("tokens_per_s", "tokens/s", 0),
    Column("first_p50_s", "first token, p50 s", 2),
    Column("first_p99_s", "first token, p99 s", 2),
    Column("last_first_p50_s", "of the last choice, p50 s", 2),
    Column("last_first_p99_s", "of the last choice, p99 s", 2),
    Column("total_p50_s", "total, p50 s", 2),
    Column("total_p99_s", "total, p99 s", 2),
    Column("requests", "requests", 0),
    Column("failed", "failed", 0),
    Column("peak_mib", "peak MiB", 0),
)


@dataclass(frozen=True)
class ServerFacts:
    url: str
    model: str
    version: str
    idle_percent: float | None
    """Of one core, with nothing to do; None where its processes cannot be seen."""

    def __str__(self) -> str:
        return f"{self.model} at {self.url}, version {self.version}, idle {shown(self.idle_percent, 1)} % of a core"


@dataclass(frozen=True)
class Conditions:
    """Without these a figure means nothing."""

    machine: Mapping[str, str]
    ours: ServerFacts
    peer: ServerFacts
    repeats: int
    seed: int
    """Of the prompts and the schedule."""

    def print(self, console: Console) -> None:
        lines = {**self.machine, "ours": str(self.ours), "peer": str(self.peer), "repeats": str(self.repeats)}
        for name, value in lines.items():
            console.print(f"{name:12} {value}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class GridReport:
    conditions: Conditions
    rows: Sequence[Row]
    floors: Sequence[Floor]

    @property
    def all_floors_met(self) -> bool:
        return all(floor.met for floor in self.floors)

    def json(self) -> str:
        rows = [asdict(row.cell) | row.versus.record() for row in self.rows]
        floors = [floor.record() for floor in self.floors]
        return json.dumps({"conditions": asdict(self.conditions), "rows": rows, "floors": floors})

    def print(self, console: Console) -> None:
        self.conditions.print(console)
        console.print(grid_table(self.rows))
        for floor in self.floors:
            console.print(floor.line(), highlight=False)


@dataclass(frozen=True)
class RateReport:
    conditions: Conditions
    rate: float
    arrivals: Sequence[Arrival]
    versus: Versus

    def json(self) -> str:
        asked = {"conditions": asdict(self.conditions), "rate": self.rate, "arrivals": len(self.arrivals)}
        return json.dumps(asked | self.versus.record())

    def print(self, console: Console) -> None:
        self.conditions.print(console)
        choices = sum(arrival.n for arrival in self.arrivals)
        asked = f"{len(self.arrivals)} requests with {choices} choices, {self.rate:g} a second"
        console.print(asked, highlight=False)
        console.print(rate_table(self.versus))


def grid_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("prompt", "tokens", "n"):
        table.add_column(f"{head}\n", justify="right")
    add_columns(table, GRID_COLUMNS)
    for row in rows:
        cell = (row.cell.prompt_tokens, row.cell.max_tokens, row.cell.n)
        table.add_row(*map(str, cell), *cells_of(row.versus, GRID_COLUMNS))
    return table


def rate_table(versus: Versus) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for head in ("ours / peer", "ratio"):
        table.add_column(head, justify="right")
    for line in RATE_LINES:
        table.add_row(line.head, *cells_of(versus, [line]))
    return table
