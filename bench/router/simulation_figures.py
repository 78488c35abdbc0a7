"""Figures of the simulation of routing, and their table rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.program.report import Cells
from bench.router.simulated_worker import SimulatedGroup
from bench.router.simulation import SimulationOutcome

SMALL = 4
"""Maximum number of choices of a small group."""
LARGE = 32
"""Minimum number of choices of a large group."""


@dataclass(frozen=True)
class SimulationFigures:
    """The results of one way to route or to queue, over one stream of groups."""

    workers: int
    load: float
    way: str
    unlike: float
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    total_p50_s: float
    total_p99_s: float
    total_mean_s: float
    hit_ratio: float
    """Share of prompt tokens that were cached."""
    small_first_p99_s: float
    """Time to the first token of small groups. NaN if there are none."""
    large_first_p99_s: float
    """Time to the first token of large groups. NaN if there are none."""

    def routing_cells(self) -> Cells:
        return [
            ("workers", self.workers, ""),
            ("load", self.load, ".0%"),
            ("way", self.way, "<"),
            ("unlike", self.unlike, ".2f"),
            ("tokens/s", self.tokens_per_s, ".0f"),
            ("first p50", self.first_p50_s, ".2f"),
            ("p99", self.first_p99_s, ".2f"),
            ("total p50", self.total_p50_s, ".2f"),
            ("p99", self.total_p99_s, ".2f"),
            ("mean", self.total_mean_s, ".2f"),
            ("hits", self.hit_ratio, ".0%"),
        ]

    def queue_cells(self) -> Cells:
        return [
            ("load", self.load, ".0%"),
            ("queue", self.way, "<"),
            (f"first p99, n <= {SMALL}", self.small_first_p99_s, ".2f"),
            (f"first p99, n >= {LARGE}", self.large_first_p99_s, ".2f"),
            ("all p50", self.first_p50_s, ".2f"),
            ("p99", self.first_p99_s, ".2f"),
            ("tokens/s", self.tokens_per_s, ".0f"),
        ]


def figures(way: str, workers: int, load: float, outcome: SimulationOutcome) -> SimulationFigures:
    groups = outcome.groups
    totals = _seconds(groups, lambda group: group.end_s)
    return SimulationFigures(
        workers=workers,
        load=load,
        way=way,
        unlike=outcome.unlike,
        tokens_per_s=sum(sum(group.lengths) for group in groups) / outcome.seconds,
        first_p50_s=_quantile(_firsts(groups), 0.5),
        first_p99_s=_quantile(_firsts(groups), 0.99),
        total_p50_s=_quantile(totals, 0.5),
        total_p99_s=_quantile(totals, 0.99),
        total_mean_s=fmean(totals),
        hit_ratio=sum(group.cached_tokens for group in groups) / sum(group.prompt_tokens for group in groups),
        small_first_p99_s=_quantile(_firsts([group for group in groups if group.choices <= SMALL]), 0.99),
        large_first_p99_s=_quantile(_firsts([group for group in groups if group.choices >= LARGE]), 0.99),
    )


def _firsts(groups: Sequence[SimulatedGroup]) -> list[float]:
    return _seconds(groups, lambda group: group.first_s)


def _seconds(groups: Sequence[SimulatedGroup], moment: Callable[[SimulatedGroup], float | None]) -> list[float]:
    """Returns the times from the arrival to a moment, in ascending order."""
    moments = [(group, moment(group)) for group in groups]
    return sorted(at_s - group.arrival_s for group, at_s in moments if at_s is not None)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
