"""The results of `bench.ray`: two tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.client.load import Timing
from bench.program.report import Table, columns_table

PARTS = ("worker", "gateway", "proxy", "rest")


@dataclass(frozen=True)
class Cost:
    """What one load cost on one way."""

    tokens_per_s: float
    first_s: float
    us_per_token: Mapping[str, float]
    """CPU time by part of the system."""

    @classmethod
    def middle(cls, costs: Sequence["Cost"]) -> "Cost":
        """Returns the median of each figure."""
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


def scripted_table(rows: Sequence[Row]) -> Table:
    heads = [("n", ""), ("clients", ""), ("way", "<"), ("tokens/s", ",.0f"), ("first ms", ".1f"), ("us a token", ".2f")]
    return columns_table([*heads, *((part, ".2f") for part in PARTS)], map(cells_of, rows))


def cells_of(row: Row) -> Sequence[object]:
    us, told = row.cost.us_per_token, (row.cost.tokens_per_s, row.cost.first_s * 1e3)
    return (row.n, row.clients, row.way, *told, sum(us.values()), *(us.get(part) for part in PARTS))


def model_table(model: Mapping[str, Mapping[int, Timing]]) -> Table:
    """`model`: times by way and n."""
    heads = [("n", ""), ("way", "<"), ("first s", ".2f"), ("last first s", ".2f"), ("total s", ".2f")]
    ns = next(iter(model.values()))
    cells = [
        (n, way, timing.first_s, timing.last_first_s, timing.total_s, timing.decode_tokens_per_s)
        for n in ns
        for way, timing in ((way, timings[n]) for way, timings in model.items())
    ]
    return columns_table([*heads, ("decode tokens/s", ".0f")], cells)
