"""Figures of the simulation of routing, and tables of them for people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from bench.router_decision import DecisionCost
from bench.router_engine import Group
from bench.router_run import Outcome

SMALL = 4
"""Groups of at most so many choices are the small ones."""
LARGE = 32


@dataclass(frozen=True)
class Figures:
    """One way to route, or to queue, over one stream of groups. Seconds."""

    way: str
    workers: int
    load: float
    unlike: float
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    total_p50_s: float
    total_p99_s: float
    total_mean_s: float
    hit_ratio: float
    """Prompt tokens found in a cache, of all."""
    small_first_p99_s: float
    large_first_p99_s: float
    """Until the first token, of groups of at most SMALL and at least LARGE choices; NaN without any."""


def figures(way: str, workers: int, load: float, outcome: Outcome) -> Figures:
    groups = outcome.groups
    totals = _seconds(groups, lambda group: group.end_s)
    return Figures(
        way=way,
        workers=workers,
        load=load,
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
    heads = ("workers", "load", "way", "unlike", "tokens/s", "first p50", "p99", "total p50", "p99", "mean", "hits")
    table = _table(heads)
    for row in rows:
        seconds = (row.first_p50_s, row.first_p99_s, row.total_p50_s, row.total_p99_s, row.total_mean_s)
        table.add_row(
            str(row.workers),
            f"{row.load:.0%}",
            row.way,
            f"{row.unlike:.2f}",
            f"{row.tokens_per_s:.0f}",
            *(f"{value:.2f}" for value in seconds),
            f"{row.hit_ratio:.0%}",
        )
    return table


def queue_table(rows: Sequence[Figures]) -> Table:
    table = _table(
        ("load", "queue", f"first p99, n <= {SMALL}", f"first p99, n >= {LARGE}", "all p50", "p99", "tokens/s")
    )
    for row in rows:
        seconds = (row.small_first_p99_s, row.large_first_p99_s, row.first_p50_s, row.first_p99_s)
        table.add_row(f"{row.load:.0%}", row.way, *(f"{value:.2f}" for value in seconds), f"{row.tokens_per_s:.0f}")
    return table


def decision_table(rows: Sequence[DecisionCost]) -> Table:
    table = _table(("workers", "blocks", "names us", "overlap us", "choice us", "total us", "bytes a block"))
    for row in rows:
        costs = (row.names_us, row.overlap_us, row.choice_us, row.total_us, row.bytes_per_block)
        table.add_row(str(row.workers), str(row.blocks), *(f"{value:.0f}" for value in costs))
    return table


def _table(heads: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in ("way", "queue") else "right")
    return table


def _firsts(groups: Sequence[Group]) -> list[float]:
    return _seconds(groups, lambda group: group.first_s)


def _seconds(groups: Sequence[Group], moment: Callable[[Group], float | None]) -> list[float]:
    """From arrival to that moment, in order of length."""
    moments = [(group, moment(group)) for group in groups]
    return sorted(at_s - group.arrival_s for group, at_s in moments if at_s is not None)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
