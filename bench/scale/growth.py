"""Computes how fast costs grow with work: exponents from row to row and over all rows, and tables."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.client.load import Timing
from bench.program.report import Floor, Table, columns_table

MAX_EXPONENT = 1.1


@dataclass(frozen=True)
class Point:
    """The cost of some amount of work."""

    work: int
    """Number of choices or groups."""
    max_tokens: int
    timing: Timing
    peak_mib: float | None

    @property
    def step_ms(self) -> float:
        """Returns the time for one more token of every choice, while all are being written."""
        return (self.timing.total_s - self.timing.last_first_s) / (self.max_tokens - 1) * 1000

    @property
    def ms_per_token(self) -> float:
        """Returns the total time, prefill included, divided by all tokens."""
        return self.timing.total_s / self.timing.tokens * 1000

    @property
    def tokens_per_s(self) -> float:
        """Returns all tokens divided by the total time."""
        return self.timing.tokens / self.timing.total_s

    def cells(self, *, with_steps: bool) -> list[object]:
        times = (self.timing.first_s, self.timing.last_first_s, self.timing.total_s)
        steps = (self.step_ms, self.timing.decode_tokens_per_s) if with_steps else (None, None)
        return [self.work, *times, *steps, self.ms_per_token, self.tokens_per_s, self.peak_mib]

    def record(self) -> dict[str, object]:
        rates = {"step_ms": self.step_ms, "decode_tokens_per_s": self.timing.decode_tokens_per_s}
        return asdict(self) | rates | {"ms_per_token": self.ms_per_token, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class Growth:
    """The growth of one cost over some points: cost ~ work ** exponent."""

    cost: str
    exponents: Sequence[float]
    """The exponent from each point to the next."""
    fit: float
    """The exponent that fits all of them best (least squares of the logarithms)."""

    @property
    def worst(self) -> float:
        return max(self.exponents)


def growth(cost: str, works: Sequence[int], costs: Sequence[float]) -> Growth:
    """Computes the growth over at least two points, each with more work than the one before."""
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
"""The time of a step is left out: groups begin one after the other, so there is no time in which all are written."""


@dataclass(frozen=True)
class Series:
    """One kind of work, from little to much."""

    work: str
    """The unit of work: choices or groups."""
    costs: Sequence[str]
    points: Sequence[Point]

    def growths(self) -> list[Growth]:
        """Returns the growth of each cost that was measured at every point; none if there is only one point."""
        works = [point.work for point in self.points]
        found = []
        for cost in self.costs if len(works) > 1 else ():
            values = [value for value in map(COSTS[cost], self.points) if value]
            if len(values) == len(works):
                found.append(growth(cost, works, values))
        return found

    def floors(self) -> list[Floor]:
        return [Floor(f"{g.cost} over {self.work}, exponent", g.worst, MAX_EXPONENT) for g in self.growths()]

    def shown(self) -> Iterator[Table | str]:
        yield self.table()
        for g in self.growths():
            yield f"{g.cost} grows as {self.work}^{g.fit:.2f}, at most ^{g.worst:.2f} in a row"

    def table(self) -> Table:
        growths = self.growths()
        heads = [(self.work, ""), ("first s", ".2f"), ("last first s", ".2f"), ("total s", ".2f"), ("ms a step", ".1f")]
        heads += [("decode tokens/s", ".0f"), ("ms a token", ".2f"), ("tokens/s", ".0f"), ("peak MiB", ".0f")]
        heads += [(f"{g.cost} ^", ".2f") for g in growths]
        with_steps = "time of a step" in self.costs
        cells = [
            [*point.cells(with_steps=with_steps), *(g.exponents[place - 1] if place else None for g in growths)]
            for place, point in enumerate(self.points)
        ]
        return columns_table(heads, cells)

    def record(self) -> dict[str, object]:
        points = [point.record() for point in self.points]
        growths = [asdict(g) | {"worst": g.worst} for g in self.growths()]
        return {"work": self.work, "points": points, "growths": growths}
