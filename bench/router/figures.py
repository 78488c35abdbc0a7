"""Figures of the simulation of routing, and their tables."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

from bench.program.report import Table, columns_table
from bench.router.decision_cost import DecisionCost
from bench.router.simulated_worker import Group
from bench.router.simulation import Outcome

SMALL = 4
"""Small groups have at most this many choices."""
LARGE = 32
"""Large groups have at least this many choices."""


@dataclass(frozen=True)
class Figures:
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
    """Share of prompt tokens that were found in a cache."""
    small_first_p99_s: float
    """Time to the first token of small groups; NaN if there are none."""
    large_first_p99_s: float
    """Time to the first token of large groups; NaN if there are none."""


def figures(way: str, workers: int, load: float, outcome: Outcome) -> Figures:
    groups = outcome.groups
    totals = _seconds(groups, lambda group: group.end_s)
    return Figures(
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


def routing_table(rows: Sequence[Figures]) -> Table:
    heads = [("workers", ""), ("load", ".0%"), ("way", "<"), ("unlike", ".2f"), ("tokens/s", ".0f")]
    heads += [(head, ".2f") for head in ("first p50", "p99", "total p50", "p99", "mean")]
    return columns_table([*heads, ("hits", ".0%")], (astuple(row)[:-2] for row in rows))


def queue_table(rows: Sequence[Figures]) -> Table:
    heads = [("load", ".0%"), ("queue", "<"), (f"first p99, n <= {SMALL}", ".2f"), (f"first p99, n >= {LARGE}", ".2f")]
    heads += [("all p50", ".2f"), ("p99", ".2f"), ("tokens/s", ".0f")]
    firsts = [(row.small_first_p99_s, row.large_first_p99_s, row.first_p50_s, row.first_p99_s) for row in rows]
    return columns_table(
        heads, ((row.load, row.way, *own, row.tokens_per_s) for row, own in zip(rows, firsts, strict=True))
    )


def decision_table(rows: Sequence[DecisionCost]) -> Table:
    heads = [("workers", ""), ("blocks", ""), ("names us", ".0f"), ("overlap us", ".0f"), ("choice us", ".0f")]
    heads += [("total us", ".0f"), ("bytes a block", ".0f")]
    cells = [
        (row.workers, row.blocks, row.names_us, row.overlap_us, row.choice_us, row.total_us, row.bytes_per_block)
        for row in rows
    ]
    return columns_table(heads, cells)


def _firsts(groups: Sequence[Group]) -> list[float]:
    return _seconds(groups, lambda group: group.first_s)


def _seconds(groups: Sequence[Group], moment: Callable[[Group], float | None]) -> list[float]:
    """Returns the times from arrival to that moment, the shortest first."""
    moments = [(group, moment(group)) for group in groups]
    return sorted(at_s - group.arrival_s for group, at_s in moments if at_s is not None)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
