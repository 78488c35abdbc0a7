"""Computes the growth of costs with work: exponents from row to row and over all rows, targets, and tables."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.client.load import Timing
from bench.program.report import Cells, Table, Target, table

MAX_EXPONENT = 1.1


@dataclass(frozen=True)
class WorkPoint:
    """The cost of one amount of work."""

    work: int
    """Number of choices or groups."""
    max_tokens: int
    timing: Timing
    peak_mib: float | None

    @property
    def step_ms(self) -> float:
        """Returns the time for one more token of every choice, while all choices are running."""
        return (self.timing.total_s - self.timing.last_first_s) / (self.max_tokens - 1) * 1000

    @property
    def ms_per_token(self) -> float:
        """Returns the total time, including prefill, divided by the number of all tokens."""
        return self.timing.total_s / self.timing.tokens * 1000

    @property
    def tokens_per_s(self) -> float:
        """Returns the number of all tokens divided by the total time."""
        return self.timing.tokens / self.timing.total_s

    def cells(self, work: str, *, with_steps: bool) -> Cells:
        return [
            (work, self.work, ""),
            ("first s", self.timing.first_s, ".2f"),
            ("last first s", self.timing.last_first_s, ".2f"),
            ("total s", self.timing.total_s, ".2f"),
            ("ms per step", self.step_ms if with_steps else None, ".1f"),
            ("decode tokens/s", self.timing.decode_tokens_per_s if with_steps else None, ".0f"),
            ("ms per token", self.ms_per_token, ".2f"),
            ("tokens/s", self.tokens_per_s, ".0f"),
            ("peak MiB", self.peak_mib, ".0f"),
        ]

    def record(self) -> dict[str, object]:
        rates = {"step_ms": self.step_ms, "decode_tokens_per_s": self.timing.decode_tokens_per_s}
        return asdict(self) | rates | {"ms_per_token": self.ms_per_token, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class CostGrowth:
    """The growth of one cost over several points: cost ~ work ** exponent."""

    cost: str
    exponents: Sequence[float]
    """The exponent from each point to the next."""
    fit: float
    """The exponent that fits all points best (least squares of the logarithms)."""

    @property
    def worst(self) -> float:
        return max(self.exponents)


def growth(cost: str, works: Sequence[int], costs: Sequence[float]) -> CostGrowth:
    """Computes the growth over at least two points with ascending amounts of work."""
    xs, ys = [math.log(work) for work in works], [math.log(cost) for cost in costs]
    pairs = itertools.pairwise(zip(xs, ys, strict=True))
    exponents = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return CostGrowth(cost, exponents, rise / sum((x - x_mean) ** 2 for x in xs))


COSTS: Mapping[str, Callable[[WorkPoint], float | None]] = {
    "time of a step": lambda point: point.step_ms,
    "total": lambda point: point.timing.total_s,
    "last first token": lambda point: point.timing.last_first_s,
    "peak memory": lambda point: point.peak_mib,
}
CHOICE_COSTS = tuple(COSTS)
GROUP_COSTS = ("total", "peak memory")
"""Costs of groups. The time of a step is left out: groups start one after the other, so they never all run at once."""


@dataclass(frozen=True)
class WorkSeries:
    """One kind of work, in ascending amounts."""

    work: str
    """The unit of work: choices or groups."""
    costs: Sequence[str]
    points: Sequence[WorkPoint]

    def growths(self) -> list[CostGrowth]:
        """Returns the growth of each cost that was measured at every point. Returns none for a single point."""
        works = [point.work for point in self.points]
        found = []
        for cost in self.costs if len(works) > 1 else ():
            values = [value for value in map(COSTS[cost], self.points) if value]
            if len(values) == len(works):
                found.append(growth(cost, works, values))
        return found

    def targets(self) -> list[Target]:
        return [Target(f"{g.cost} over {self.work}, exponent", g.worst, MAX_EXPONENT) for g in self.growths()]

    def shown(self) -> Iterator[Table | str]:
        yield self.table()
        for g in self.growths():
            yield f"{g.cost} grows as {self.work}^{g.fit:.2f}, at most ^{g.worst:.2f} from a row to the next"

    def table(self) -> Table:
        return table(self._cells(place, point) for place, point in enumerate(self.points))

    def _cells(self, place: int, point: WorkPoint) -> Cells:
        exponents = [(f"{g.cost} ^", g.exponents[place - 1] if place else None, ".2f") for g in self.growths()]
        return [*point.cells(self.work, with_steps="time of a step" in self.costs), *exponents]

    def record(self) -> dict[str, object]:
        points = [point.record() for point in self.points]
        growths = [asdict(g) | {"worst": g.worst} for g in self.growths()]
        return {"work": self.work, "points": points, "growths": growths}
