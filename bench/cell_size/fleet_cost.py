"""Measures a fleet of many members in the process that manages it: decisions, changes, joins, waiting groups.

The benchmark uses `Fleet` and `Router` over fake engines. A decision is the work of `Router` from the request to the
worker: the eligible workers, the workers with a cached prefix of the prompt, the shortlist, the choice. A group
needs four decisions if prefill and decode are separate (`gateway_count.DECISIONS`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from motet.block_names import block_names
from motet.engine import Worker, WorkerState
from motet.ids import RequestId
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.serving import WorkKind
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.transfer.ticket import TransferAddress
from motet.types import GenerateRequest, Role, SamplingParams, choice_starts

PROMPT = tuple(range(1340))
BLOCK_SIZE = 16
COMMON_BLOCKS = 20
"""Number of leading blocks of the prompt that every worker has cached; one worker has cached all blocks."""
WAITING = 256
"""Number of groups of a worker that died. All of them wait for a change of the fleet."""


@dataclass(frozen=True)
class FleetCost:
    workers: int
    decision_us: float
    cold_us: float
    """Time of a decision about a prompt that is not cached anywhere."""
    change_us: float
    """Time of a change: a member starts to drain or is ready again, and the next group queries the eligible workers."""
    join_us: float
    """Time per member if all members join one after the other."""
    wait_us: float
    """Time per group that waits and is woken together with the others."""


def fleet_cost(workers: int, *, turns: int = 200) -> FleetCost:
    started = time.perf_counter()
    fleet = joined(workers)
    join_us = (time.perf_counter() - started) / workers * 1e6
    dispatcher = Router(fleet).dispatcher
    warm, cold = _request(PROMPT), _request(tuple(reversed(PROMPT)))
    names = block_names(PROMPT, BLOCK_SIZE, salt="")
    for member in fleet.members:
        fleet.cached_blocks.stored(member.id, names[:COMMON_BLOCKS])
    fleet.cached_blocks.stored(fleet.members[-1].id, names)
    return FleetCost(
        workers=workers,
        decision_us=_median_us(lambda: dispatcher.chooser.backlog(WorkKind.GENERATE, warm), turns),
        cold_us=_median_us(lambda: dispatcher.chooser.backlog(WorkKind.GENERATE, cold), turns),
        change_us=_median_us(lambda: _change(fleet), max(5, turns // 10)),
        join_us=join_us,
        wait_us=asyncio.run(_wait_us(fleet)),
    )


def joined(workers: int) -> Fleet:
    """Returns a fleet of ready workers. As in a gateway, all workers are expected before the first one joins."""
    fleet = Fleet()
    for number in range(workers):
        fleet.expect(f"w{number}", "-")
    for number in range(workers):
        info = fake_info(role=Role.DECODE, transfer=TransferAddress(f"engine-{number}", "127.0.0.1", 1))
        fleet.put(Worker(f"w{number}", FakeEngine(lambda request, start: (1,), info=info), "-"))
    return fleet


def _change(fleet: Fleet) -> None:
    first = fleet.members[0]
    fleet.mark(first.id, WorkerState.DRAINING if first.state is WorkerState.READY else WorkerState.READY)
    fleet.catalog.ready()


async def _wait_us(fleet: Fleet) -> float:
    async def wait() -> None:
        await fleet.changes.wait()

    started = time.perf_counter()
    waiting = [asyncio.create_task(wait()) for _ in range(WAITING)]
    await asyncio.sleep(0)
    fleet.changes.wake()
    await asyncio.gather(*waiting)
    return (time.perf_counter() - started) / WAITING * 1e6


def _request(prompt: tuple[int, ...]) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("g"), prompt=prompt, choices=choice_starts(8, 0), sampling=SamplingParams(max_tokens=64)
    )


def _median_us(work: Callable[[], object], turns: int) -> float:
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6
