"""How fast costs grow with work: exponents between neighbours and over the whole, tables, curves, JSON."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench.floor import Floor
from bench.load import Timing
from bench.versus import shown

MAX_EXPONENT = 1.1


@dataclass(frozen=True)
class Point:
    """What so much work took."""

    work: int
    """Choices, or groups."""
    max_tokens: int
    timing: Timing
    peak_mib: float | None

    @property
    def step_ms(self) -> float:
        """One more token for every choice, while all are being written."""
        return (self.timing.total_s - self.timing.last_first_s) / (self.max_tokens - 1) * 1000

    @property
    def ms_per_token(self) -> float:
        """All of the time over all tokens, the prompt's prefill included."""
        return self.timing.total_s / self.timing.tokens * 1000

    @property
    def tokens_per_s(self) -> float:
        """Of that whole time."""
        return self.timing.tokens / self.timing.total_s

    def cells(self, *, with_steps: bool) -> list[str]:
        times = (self.timing.first_s, self.timing.last_first_s, self.timing.total_s)
        step_ms, decode = (self.step_ms, self.timing.decode_tokens_per_s) if with_steps else (None, None)
        rates = (shown(step_ms, 1), shown(decode, 0), shown(self.ms_per_token, 2), shown(self.tokens_per_s, 0))
        return [str(self.work), *(shown(time_s, 2) for time_s in times), *rates, shown(self.peak_mib, 0)]

    def record(self) -> dict[str, object]:
        rates = {"step_ms": self.step_ms, "decode_tokens_per_s": self.timing.decode_tokens_per_s}
        return asdict(self) | rates | {"ms_per_token": self.ms_per_token, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class Growth:
    """Of one cost over some points: cost ~ work ** exponent."""

    cost: str
    exponents: Sequence[float]
    """From each point to the next."""
    fit: float
    """The exponent that fits all of them best (least squares of the logarithms)."""

    @property
    def worst(self) -> float:
        return max(self.exponents)


def growth(cost: str, works: Sequence[int], costs: Sequence[float]) -> Growth:
    """At least two points, each with more work than the one before."""
    xs, ys = [math.log(work) for work in works], [math.log(cost) for cost in costs]
    pairs = itertools.pairwise(zip(xs, ys, strict=True))
    exponents = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return Growth(cost, exponents, rise / sum((x - x_mean) ** 2 for x in xs))


COSTS: Mapping[str, Callable[[Point], float | None]] = {
    "time of a step": lambda point: point.step_ms,
    "total": lambda point: point.timing.total_s,
    "last first token": lambda point: point.timing.last_first_s,
    "peak memory": lambda point: point.peak_mib,
}
OF_CHOICES = tuple(COSTS)
OF_GROUPS = ("total", "peak memory")
"""Groups begin one after the other: the last waits while others are written, and never are all being written."""


@dataclass(frozen=True)
class Series:
    """One kind of work, from little to much."""

    work: str
    """What is counted."""
    costs: Sequence[str]
    points: Sequence[Point]

    def growths(self) -> list[Growth]:
        """Of the costs that were measured; none where there is nothing to compare."""
        works = [point.work for point in self.points]
        found = []
        for cost in self.costs if len(works) > 1 else ():
            values = [value for value in map(COSTS[cost], self.points) if value]
            if len(values) == len(works):
                found.append(growth(cost, works, values))
        return found

    def floors(self) -> list[Floor]:
        return [Floor(f"{g.cost} over {self.work}, exponent", g.worst, MAX_EXPONENT) for g in self.growths()]

    def lines(self) -> list[str]:
        return [f"{g.cost} grows as {self.work}^{g.fit:.2f}, at most ^{g.worst:.2f} in a row" for g in self.growths()]

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        growths = self.growths()
        times = ("first s", "last first s", "total s")
        rates = ("ms a step", "decode tokens/s", "ms a token", "tokens/s")
        for head in (self.work, *times, *rates, "peak MiB", *(f"{g.cost} ^" for g in growths)):
            table.add_column(head, justify="right")
        for place, point in enumerate(self.points):
            exponents = ["-" if place == 0 else f"{g.exponents[place - 1]:.2f}" for g in growths]
            table.add_row(*point.cells(with_steps="time of a step" in self.costs), *exponents)
        return table

    def record(self) -> dict[str, object]:
        points = [point.record() for point in self.points]
        growths = [asdict(g) | {"worst": g.worst} for g in self.growths()]
        return {"work": self.work, "points": points, "growths": growths}


@dataclass(frozen=True)
class ScaleReport:
    conditions: Mapping[str, str]
    series: Sequence[Series]

    @property
    def floors(self) -> list[Floor]:
        return [floor for series in self.series for floor in series.floors()]

    def json(self) -> str:
        series = [series.record() for series in self.series]
        floors = [floor.record() for floor in self.floors]
        return json.dumps({"conditions": self.conditions, "series": series, "floors": floors})

    def print(self, console: Console) -> None:
        for name, value in self.conditions.items():
            console.print(f"{name:12} {value}", highlight=False, soft_wrap=True)
        for series in self.series:
            console.print(series.table())
            for line in series.lines():
                console.print(line, highlight=False)
        for floor in self.floors:
            console.print(floor.line(), highlight=False)
