"""The figures of engines at each scrape. Their counters never fall while the server lives, whatever becomes of engines.

    decode-0                        read    shown
    its engine writes               10      10
    it is silent, or dead           -       10      what was read last
    another engine is in its place  0       10      begins at what the one before had counted
    and writes                      4       14
    it has left the fleet           -       -       its own series end; in the sum over all workers its 14 stay

What an engine counted between its last reading and its end nobody knows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from motet.metrics.stats import EngineStats, total_stats
from motet.types import EngineInfo, Role


@dataclass(frozen=True, kw_only=True)
class EngineSample:
    """A worker whose figures are published here."""

    worker: str
    role: Role
    engine: object
    """The engine it has, or had last. Each start of an engine is another object, whose counters begin at 0."""
    info: EngineInfo | None = None
    """None while it has no engine."""
    stats: EngineStats | None = None
    """None if it did not answer."""


@dataclass
class WorkerTotals:
    """What the engines of one worker have counted, one after the other."""

    engine: object
    last: EngineStats
    """The last reading of this engine."""
    before: EngineStats
    """The sum of the last readings of those before it."""

    @property
    def total(self) -> EngineStats:
        return total_stats([self.before, self.last])


class EngineCounters:
    """Remembers one reading and one sum for each worker that is there, and one sum for all that have left.

    Of the figures that it returns only counters and histograms mean anything: gauges are of this moment."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerTotals] = {}
        self._left: EngineStats | None = None
        self._asked_s = -inf

    def note(self, samples: Iterable[EngineSample], *, asked_s: float) -> None:
        """Notes what all workers said when they were asked at `asked_s`. Answers to an older question than the last
        are not noted: they come late because one worker was slow, and newer figures are here already."""
        if asked_s < self._asked_s:
            return
        self._asked_s = asked_s
        there = set[str]()
        for one in samples:
            there.add(one.worker)
            if one.stats is not None:
                self._read(one.worker, engine=one.engine, stats=one.stats)
        for worker in self._workers.keys() - there:
            gone = self._workers.pop(worker).total
            self._left = gone if self._left is None else total_stats([self._left, gone])

    def of(self, worker: str) -> EngineStats | None:
        """Returns what a worker has counted; None if it has never answered, or has left."""
        counted = self._workers.get(worker)
        return None if counted is None else counted.total

    def total(self) -> EngineStats | None:
        """Returns what all workers together have counted; None if none has ever answered."""
        parts = [counted.total for counted in self._workers.values()]
        if self._left is not None:
            parts.append(self._left)
        return total_stats(parts) if parts else None

    def _read(self, worker: str, *, engine: object, stats: EngineStats) -> None:
        known = self._workers.get(worker)
        if known is None:
            self._workers[worker] = WorkerTotals(engine, stats, before=EngineStats())
        elif known.engine is engine:
            known.last = stats
        else:
            self._workers[worker] = WorkerTotals(engine, stats, before=known.total)
