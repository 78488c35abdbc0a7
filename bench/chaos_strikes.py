"""Strikes at the engine processes of a cell: killed or stopped, one after the other, at moments drawn by chance."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

KILLED, STOPPED = "killed", "stopped"
SIGNALS = {KILLED: signal.SIGKILL, STOPPED: signal.SIGSTOP}


@dataclass(frozen=True)
class Strike:
    """One of them."""

    at_s: float
    worker: str
    kind: str
    busy: bool
    """Whether the worker had choices."""


@dataclass
class Striker:
    """Strikes until it is cancelled."""

    client: httpx.AsyncClient
    every_s: tuple[float, float]
    stopped_share: float
    dice: random.Random
    strikes: list[Strike] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        return Counter(f"{strike.worker.partition('-')[0]} {strike.kind}" for strike in self.strikes)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.dice.uniform(*self.every_s))
            await self._strike()

    async def _strike(self) -> None:
        """At a worker that is ready, never at the last one that decodes: whoever waits for all of them would wait for
        as long as a start takes, which says nothing of migration."""
        workers = (await self.client.get("/status")).json()["workers"]
        ready = [worker for worker in workers if worker["state"] == "ready" and worker["pid"]]
        decoding = [worker for worker in ready if worker["role"] != "prefill"]
        targets = [worker for worker in ready if worker not in decoding or len(decoding) > 1]
        if not targets:
            return
        worker = self.dice.choice(targets)
        kind = STOPPED if self.dice.random() < self.stopped_share else KILLED
        self.strikes.append(Strike(time.monotonic(), worker["id"], kind, bool(worker.get("choices_running"))))
        os.kill(worker["pid"], SIGNALS[kind])
