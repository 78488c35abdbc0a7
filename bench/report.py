"""A table for people and a record for machines, and whether the floors were met."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench.floor import Floor
from bench.load import Timing
from motet.deploy.figures import Figures

FLOOR_N = 32
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """All about one n."""

    n: int
    group: Timing
    spent: Figures
    """The server's counters over one of the requests."""
    separate: Timing | None
    """n requests at once, without prefix cache."""


@dataclass(frozen=True)
class Report:
    machine: Mapping[str, str]
    prompt_tokens: int
    max_tokens: int
    rows: Sequence[Row]
    floors: Sequence[Floor]

    @property
    def all_floors_met(self) -> bool:
        return all(floor.met for floor in self.floors)

    def json(self) -> str:
        rows = [asdict(row) | {"decode_tokens_per_s": row.group.decode_tokens_per_s} for row in self.rows]
        return json.dumps(asdict(self) | {"rows": rows, "floors": [floor.record() for floor in self.floors]})

    def print(self, console: Console) -> None:
        for name, value in self.machine.items():
            console.print(f"{name:12} {value}", highlight=False, soft_wrap=True)
        console.print(f"prompt {self.prompt_tokens} tokens, {self.max_tokens} tokens a choice", highlight=False)
        console.print(table_of(self.rows))
        for floor in self.floors:
            console.print(floor.line(), highlight=False)


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    heads = (
        "n",
        "first s",
        "last first s",
        "total s",
        "tokens/s",
        "blocks",
        "shared",
        "MiB saved",
        "separate s",
        "gain",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        separate = ("-", "-")
        if row.separate:
            separate = (f"{row.separate.total_s:.2f}", f"{row.separate.total_s / row.group.total_s:.1f}x")
        table.add_row(
            str(row.n),
            f"{row.group.first_s:.2f}",
            f"{row.group.last_first_s:.2f}",
            f"{row.group.total_s:.2f}",
            f"{row.group.decode_tokens_per_s:.0f}",
            str(row.group.blocks_used),
            str(row.spent.blocks_shared),
            f"{row.spent.bytes_saved / MIB:.0f}",
            *separate,
        )
    return table


def floors(rows: Sequence[Row]) -> list[Floor]:
    """Those that can be told from the rows there are."""
    by_n = {row.n: row for row in rows}
    one, many = by_n.get(1), by_n.get(FLOOR_N)
    found = []
    if one and many:
        found.append(
            Floor(f"last first token, n={FLOOR_N} to n=1", many.group.last_first_s / one.group.last_first_s, 1.3)
        )
        found.append(Floor(f"total, n={FLOOR_N} to n=1", many.group.total_s / one.group.total_s, 4.0))
    if many and many.separate:
        ratio = many.group.total_s / many.separate.total_s
        found.append(Floor(f"total, n={FLOOR_N} to {FLOOR_N} separate requests", ratio, 0.5))
    return found
