"""The workers behind the server, asked all at once how they are; one that does not answer holds nobody up.

its keeper says       asked     shown as
ready, draining       yes       the same if it answers, else silent or dead; ready is draining where the server drains
silent                no        the same: it gave no sign of life for longer than we would wait here
starting, dead        no        the same, and without an engine, whatever engine it had before
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from motet.engines.base import ANSWERING, Worker, WorkerReport, WorkerState
from motet.errors import EngineError
from motet.types import EngineInfo, EngineStats, Role

WITHOUT_ENGINE = (WorkerState.STARTING, WorkerState.DEAD)


class Life(StrEnum):
    ANSWERED = "answered"
    SILENT = "silent"
    """No answer in time: in a long step, or stopped."""
    DEAD = "dead"


@dataclass(frozen=True)
class Answered:
    """What one worker said."""

    worker: Worker
    life: Life
    stats: EngineStats | None = None
    """If it answered."""


@dataclass(frozen=True)
class Seen:
    """A worker as its keeper tells of it and as it answered."""

    report: WorkerReport
    state: WorkerState
    stats: EngineStats | None = None
    """If it answered."""

    @property
    def info(self) -> EngineInfo | None:
        """Of its engine, while it has one."""
        worker = self.report.worker
        return None if worker is None or self.state in WITHOUT_ENGINE else worker.engine.info

    @property
    def alive(self) -> bool:
        """Whether it answered, or is merely slow."""
        return self.report.state in ANSWERING and self.state is not WorkerState.DEAD


class OnlyWorker:
    """`Workers` for a server whose one engine is there from the start to the end."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def reports(self) -> Sequence[WorkerReport]:
        worker = self._worker
        return (
            WorkerReport(
                id=worker.id,
                address=worker.address,
                state=WorkerState.READY,
                role=worker.engine.info.role,
                worker=worker,
                kind=worker.engine.info.kind,
            ),
        )


async def ask(workers: Iterable[Worker], *, patience_s: float) -> list[Answered]:
    """In the order of `workers`."""
    return await asyncio.gather(*(_ask(worker, patience_s) for worker in workers))


async def look(
    reports: Iterable[WorkerReport], *, patience_s: float, draining: bool = False, local_only: bool = False
) -> list[Seen]:
    """In the order of `reports`. `draining`: whether the server is; `local_only`: others are not asked."""
    reports = list(reports)
    asked = {
        report.id: report.worker
        for report in reports
        if report.worker is not None and report.state in ANSWERING and (report.worker.local or not local_only)
    }
    answers = dict(zip(asked, await ask(asked.values(), patience_s=patience_s), strict=True))
    return [_seen(report, answers.get(report.id), draining) for report in reports]


def needed(reports: Iterable[WorkerReport]) -> list[WorkerReport]:
    """Those of which one must live for the server to be of use: who decodes, and without any whoever is there."""
    reports = list(reports)
    return [report for report in reports if report.role in (Role.DECODE, Role.BOTH)] or reports


async def _ask(worker: Worker, patience_s: float) -> Answered:
    try:
        async with asyncio.timeout(patience_s):
            return Answered(worker, Life.ANSWERED, await worker.engine.stats())
    except TimeoutError:
        return Answered(worker, Life.SILENT)
    except EngineError:
        return Answered(worker, Life.DEAD)


def _seen(report: WorkerReport, answer: Answered | None, draining: bool) -> Seen:
    if answer is not None and answer.life is not Life.ANSWERED:
        return Seen(report, WorkerState.DEAD if answer.life is Life.DEAD else WorkerState.SILENT)
    state = WorkerState.DRAINING if draining and report.state is WorkerState.READY else report.state
    return Seen(report, state, answer.stats if answer else None)
