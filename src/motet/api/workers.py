"""The workers behind the server, asked all at once how they are; one that does not answer holds nobody up."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from motet.engines.base import Worker
from motet.errors import EngineError
from motet.types import EngineStats, Role


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


async def ask(workers: Iterable[Worker], *, patience_s: float) -> list[Answered]:
    """In the order of `workers`."""
    return await asyncio.gather(*(_ask(worker, patience_s) for worker in workers))


async def _ask(worker: Worker, patience_s: float) -> Answered:
    try:
        async with asyncio.timeout(patience_s):
            return Answered(worker, Life.ANSWERED, await worker.engine.stats())
    except TimeoutError:
        return Answered(worker, Life.SILENT)
    except EngineError:
        return Answered(worker, Life.DEAD)


def needed(workers: Iterable[Worker]) -> list[Worker]:
    """Those of which one must live for the server to be of use: who decodes, and in a prefill server its engine."""
    workers = list(workers)
    return [worker for worker in workers if worker.engine.info.role is not Role.PREFILL] or workers
