"""What `bench.ray` found: two tables for people, a record for machines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.load import Timing

PARTS = ("worker", "gateway", "proxy", "rest")


@dataclass(frozen=True)
class Cost:
    """What one way took for one load."""

    tokens_per_s: float
    first_s: float
    us_per_token: Mapping[str, float]
    """CPU, by part of the system."""

    @classmethod
    def middle(cls, costs: Sequence["Cost"]) -> "Cost":
        """The median of every figure by itself."""
        parts = {part for cost in costs for part in cost.us_per_token}
        return cls(
            median(cost.tokens_per_s for cost in costs),
            median(cost.first_s for cost in costs),
            {part: median(cost.us_per_token.get(part, 0.0) for cost in costs) for part in sorted(parts)},
        )


@dataclass(frozen=True)
class Row:
    """One load on one way, with scripted engines."""

    way: str
    n: int
    clients: int
    cost: Cost


@dataclass(frozen=True)
class Report:
    machine: Mapping[str, str]
    rows: Sequence[Row]
    model: Mapping[str, Mapping[int, Timing]]
    """By way and n."""

    def json(self) -> str:
        return json.dumps(asdict(self))

    def print(self, console: Console) -> None:
        for name, value in self.machine.items():
            console.print(f"{name:12} {value}", highlight=False, soft_wrap=True)
        console.print(scripted_table(self.rows))
        if self.model:
            console.print(model_table(self.model))


def scripted_table(rows: Sequence[Row]) -> Table:
    table = Table("n", "clients", "way", "tokens/s", "first ms", "us a token", *PARTS, box=None, pad_edge=False)
    for row in rows:
        parts = row.cost.us_per_token
        table.add_row(
            str(row.n),
            str(row.clients),
            row.way,
            f"{row.cost.tokens_per_s:,.0f}",
            f"{row.cost.first_s * 1e3:.1f}",
            f"{sum(parts.values()):.2f}",
            *(f"{parts[part]:.2f}" if part in parts else "-" for part in PARTS),
        )
    return table


def model_table(model: Mapping[str, Mapping[int, Timing]]) -> Table:
    table = Table("n", "way", "first s", "last first s", "total s", "decode tokens/s", box=None, pad_edge=False)
    for n in next(iter(model.values())):
        for way, timings in model.items():
            timing = timings[n]
            table.add_row(
                str(n),
                way,
                f"{timing.first_s:.2f}",
                f"{timing.last_first_s:.2f}",
                f"{timing.total_s:.2f}",
                f"{timing.decode_tokens_per_s:.0f}",
            )
    return table
