"""Strikes the workers of a server, one after the other, at random moments, and says what was left on them."""

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

Status = Mapping[str, object]
"""One worker's object in `/status`."""
Hit = Callable[[Status, signal.Signals], Awaitable[None]]


async def hit_engine(worker: Status, number: signal.Signals) -> None:
    """Sends the signal to an engine process of a cell."""
    pid = worker["pid"]
    assert isinstance(pid, int)
    os.kill(pid, number)


@dataclass
class Striker:
    """Strikes until it is cancelled. `weights`: how often each signal is chosen."""

    client: httpx.AsyncClient
    every_s: tuple[float, float]
    weights: Mapping[signal.Signals, float]
    dice: random.Random
    hit: Hit = hit_engine
    spared: frozenset[str] = frozenset()
    """Ids of workers that are never struck."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of strikes by the worker's role and the kind of strike."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as hits:
            while True:
                await asyncio.sleep(self.dice.uniform(*self.every_s))
                if (worker := self._target(await self._workers())) is not None:
                    (number,) = self.dice.choices(list(self.weights), list(self.weights.values()))
                    self.counts[f"{worker['role']} {NAMES[number]}"] += 1
                    hits.create_task(self._strike(worker, number))

    async def _strike(self, worker: Status, number: signal.Signals) -> None:
        try:
            await self.hit(worker, number)
        except ProcessLookupError:
            self.counts["missed"] += 1

    async def _workers(self) -> Sequence[Status]:
        workers: Sequence[Status] = (await self.client.get("/status")).json()["workers"]
        return workers

    def _target(self, workers: Sequence[Status]) -> Status | None:
        """Returns a ready worker, but never the last that decodes: clients would then wait for a start, which measures
        no migration."""
        ready = [worker for worker in workers if worker["state"] == "ready"]
        decoding = [worker for worker in ready if worker["role"] != "prefill"]
        targets = [worker for worker in ready if worker not in decoding or len(decoding) > 1]
        targets = [worker for worker in targets if worker["id"] not in self.spared]
        return self.dice.choice(targets) if targets else None


async def left_behind(http: httpx.AsyncClient) -> dict[str, int]:
    """Waits until every engine is ready and empty, then returns what is left. A pull from a stopped prefill engine may
    settle only at its time-out."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        workers = (await http.get("/status")).json()["workers"]
        left = {name: sum(worker.get(name) or 0 for worker in workers) for name in LEFT_BEHIND}
        settled = all(worker["state"] == "ready" for worker in workers) and not any(left.values())
        if settled or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(0.5)
