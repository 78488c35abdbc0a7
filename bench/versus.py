"""Two servers' figures of one thing, side by side, and their ratio."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

Figures = Mapping[str, float | None]
"""By name; None, or no entry, where there is nothing to tell."""


@dataclass(frozen=True)
class Versus:
    ours: Figures
    peer: Figures

    def ratio(self, name: str) -> float | None:
        """Ours over the peer's."""
        ours, peer = self.ours.get(name), self.peer.get(name)
        return ours / peer if ours is not None and peer else None

    def text(self, name: str, digits: int) -> str:
        ours, peer = (shown(figures.get(name), digits) for figures in (self.ours, self.peer))
        return f"{ours} / {peer}"

    def record(self) -> dict[str, object]:
        return {"ours": self.ours, "peer": self.peer, "ratios": {name: self.ratio(name) for name in self.ours}}


@dataclass(frozen=True)
class Column:
    name: str
    """Of the figure."""
    head: str
    digits: int


def add_columns(table: Table, columns: Sequence[Column]) -> None:
    for column in columns:
        table.add_column(f"{column.head}\nours / peer", justify="right", no_wrap=True)
        table.add_column("\nratio", justify="right", no_wrap=True, style="bold")


def cells_of(versus: Versus, columns: Sequence[Column]) -> list[str]:
    return [text for c in columns for text in (versus.text(c.name, c.digits), shown(versus.ratio(c.name), 2))]


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
