"""Injects faults into the workers of a server at random moments, one after the other, and reads what is left on
them."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

KILLED, STOPPED, DRAINED = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
NAMES = {KILLED: "killed", STOPPED: "stopped", DRAINED: "drained"}
LEFT_BEHIND = ("groups_running", "choices_running", "choices_waiting", "blocks_used", "leases", "pulls_open")
SETTLE_S = 90.0

WorkerStatus = Mapping[str, object]
"""One worker's object in `/status`."""
Inject = Callable[[WorkerStatus, signal.Signals], Awaitable[None]]


async def signal_engine(worker: WorkerStatus, number: signal.Signals) -> None:
    """Sends the signal to an engine process of a cell."""
    pid = worker["pid"]
    assert isinstance(pid, int)
    os.kill(pid, number)


@dataclass
class FaultInjector:
    """Injects faults until it is cancelled. `weights` are the relative frequencies of the signals."""

    client: httpx.AsyncClient
    every_s: tuple[float, float]
    weights: Mapping[signal.Signals, float]
    dice: random.Random
    inject: Inject = signal_engine
    spared: frozenset[str] = frozenset()
    """Ids of workers that get no faults."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of faults by role of the worker and kind of fault."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as faults:
            while True:
                await asyncio.sleep(self.dice.uniform(*self.every_s))
                if (worker := self._target(await self._workers())) is not None:
                    (number,) = self.dice.choices(list(self.weights), list(self.weights.values()))
                    self.counts[f"{worker['role']} {NAMES[number]}"] += 1
                    faults.create_task(self._inject(worker, number))

    async def _inject(self, worker: WorkerStatus, number: signal.Signals) -> None:
        try:
            await self.inject(worker, number)
        except ProcessLookupError:
            self.counts["missed"] += 1

    async def _workers(self) -> Sequence[WorkerStatus]:
        workers: Sequence[WorkerStatus] = (await self.client.get("/status")).json()["workers"]
        return workers

    def _target(self, workers: Sequence[WorkerStatus]) -> WorkerStatus | None:
        """Returns a ready worker, but not the last decode worker: clients would then wait for a start, and the pauses
        would not measure migration."""
        ready = [worker for worker in workers if worker["state"] == "ready"]
        decoding = [worker for worker in ready if worker["role"] != "prefill"]
        targets = [worker for worker in ready if worker not in decoding or len(decoding) > 1]
        targets = [worker for worker in targets if worker["id"] not in self.spared]
        return self.dice.choice(targets) if targets else None


async def left_on_workers(http: httpx.AsyncClient) -> dict[str, int]:
    """Waits until every engine is ready and empty, and returns what is left. A pull from a stopped prefill engine ends
    only at its time-out."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        workers = (await http.get("/status")).json()["workers"]
        left = {name: sum(worker.get(name) or 0 for worker in workers) for name in LEFT_BEHIND}
        settled = all(worker["state"] == "ready" for worker in workers) and not any(left.values())
        if settled or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(0.5)
