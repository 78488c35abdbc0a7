"""The results of `bench.ray`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.client.load import Timing
from bench.program.report import LEFT, Cells

PARTS = ("worker", "gateway", "proxy", "rest")


@dataclass(frozen=True)
class HopCost:
    """The cost of one load on one way."""

    tokens_per_s: float
    first_s: float
    us_per_token: Mapping[str, float]
    """CPU time by part of the system."""

    @classmethod
    def median(cls, costs: Sequence["HopCost"]) -> "HopCost":
        """Returns the median of each figure."""
        parts = {part for cost in costs for part in cost.us_per_token}
        return cls(
            median(cost.tokens_per_s for cost in costs),
            median(cost.first_s for cost in costs),
            {part: median(cost.us_per_token.get(part, 0.0) for cost in costs) for part in sorted(parts)},
        )


@dataclass(frozen=True)
class HopRow:
    """One load on one way, with scripted engines."""

    way: str
    n: int
    clients: int
    cost: HopCost

    def cells(self) -> Cells:
        us = self.cost.us_per_token
        return [
            ("n", self.n, ""),
            ("clients", self.clients, ""),
            ("way", self.way, LEFT),
            ("tokens/s", self.cost.tokens_per_s, ",.0f"),
            ("first ms", self.cost.first_s * 1e3, ".1f"),
            ("us per token", sum(us.values()), ".2f"),
            *((part, us.get(part), ".2f") for part in PARTS),
        ]


def model_rows(model: Mapping[str, Mapping[int, Timing]]) -> Iterator[Cells]:
    """Yields a row for each n and way. `model` has the times by way and n."""
    for n in next(iter(model.values())):
        for way, timings in model.items():
            yield [
                ("n", n, ""),
                ("way", way, LEFT),
                ("first s", timings[n].first_s, ".2f"),
                ("last first s", timings[n].last_first_s, ".2f"),
                ("total s", timings[n].total_s, ".2f"),
                ("decode tokens/s", timings[n].decode_tokens_per_s, ".0f"),
            ]
