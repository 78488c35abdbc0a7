"""Metrics of engines at each scrape. Counters never decrease while the server runs, even when engines are replaced.

    decode-0                          read    exposed
    its engine generates tokens       10      10
    the engine is silent or dead      -       10      the last reading
    another engine replaces it        0       10      continues from the total of the previous engine
    and generates tokens              4       14
    the worker has left the fleet     -       -       its series end; the sum over all workers keeps the 14

Events between an engine's last reading and its end are not counted."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from motet.engine_info import EngineInfo
from motet.metrics.stats import EngineStats, total_stats
from motet.types import Role


@dataclass(frozen=True, kw_only=True)
class EngineSample:
    """A worker whose metrics this server exposes, at one scrape."""

    worker: str
    role: Role
    engine: object
    """Current or last engine. Each start of an engine is another object, whose counters start at 0."""
    info: EngineInfo | None = None
    """Facts about the engine; None while the worker has none."""
    stats: EngineStats | None = None
    """Metrics of the engine; None if it did not answer."""


@dataclass
class WorkerTotals:
    """Totals over the successive engines of one worker."""

    engine: object
    last: EngineStats
    """Last reading of this engine."""
    before: EngineStats = field(default_factory=EngineStats)
    """Sum of the last readings of earlier engines."""

    @property
    def total(self) -> EngineStats:
        return total_stats([self.before, self.last])


class EngineCounters:
    """Keeps the totals of each worker of the fleet, and one sum for all workers that have left.

    Only counters and histograms of the returned stats are meaningful: gauges describe the present moment."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerTotals] = {}
        self._left: EngineStats | None = None
        self._sampled_s = -inf

    def note(self, samples: Iterable[EngineSample], *, sampled_s: float) -> None:
        """Records the samples of all workers for a scrape that started at `sampled_s`. Ignores a scrape that started
        before the last one: it is late because a worker was slow."""
        if sampled_s < self._sampled_s:
            return
        self._sampled_s = sampled_s
        present = set[str]()
        for sample in samples:
            present.add(sample.worker)
            if (stats := sample.stats) is not None:
                totals = self._workers.setdefault(sample.worker, WorkerTotals(sample.engine, stats))
                if totals.engine is not sample.engine:
                    totals.before, totals.engine = totals.total, sample.engine
                totals.last = stats
        for worker in self._workers.keys() - present:
            gone = self._workers.pop(worker).total
            self._left = gone if self._left is None else total_stats([self._left, gone])

    def of(self, worker: str) -> EngineStats | None:
        """Returns the total of one worker; None if it has never answered, or has left."""
        return None if (totals := self._workers.get(worker)) is None else totals.total

    def total(self) -> EngineStats | None:
        """Returns the total over all workers; None if none has ever answered."""
        left = [] if self._left is None else [self._left]
        parts = [totals.total for totals in self._workers.values()] + left
        return total_stats(parts) if parts else None
