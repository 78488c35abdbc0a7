"""Keeps one engine process alive: when it dies it is started again, later each time it dies soon.

    ready ──died──► dead ──back-off──► starting ──► met ──► ready, with a new process
                     └── after `restarts` in a row ──► given up

`in a row`: without having been ready for `STEADY_S` between two deaths.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from motet.config import EngineConfig
from motet.deploy.block_index import indexing
from motet.deploy.start import LocalEngine, StartEngine
from motet.engines.base import Worker, WorkerState
from motet.errors import StartupError
from motet.routing.fleet import Fleet

logger = logging.getLogger(__name__)

STEADY_S = 10.0
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 30.0

Meet = Callable[[Worker], Awaitable[None]]
"""Makes a worker known to those it exchanges KV with, before it is given any group. Never raises."""


class LocalKeeper:
    """One engine of this machine. The first start is its caller's: `adopt`."""

    def __init__(  # sizes: what is started, how, and who is told
        self,
        id: str,
        config: EngineConfig,
        *,
        fleet: Fleet,
        start_engine: StartEngine,
        address: Callable[[LocalEngine], str],
        publish: Callable[[str, LocalEngine], object],
        meet: Meet,
        restarts: int,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`publish`: tells others of the engine's blocks; `restarts`: how often in a row it is started again."""
        self.id = id
        self.role = config.role
        self.given_up = asyncio.Event()
        """Set when it is not started again."""
        self.restarted = 0
        self._config = config
        self._fleet = fleet
        self._start_engine = start_engine
        self._address = address
        self._publish = publish
        self._meet = meet
        self._restarts = restarts
        self._clock = clock
        self._wait = wait
        self._engine: LocalEngine | None = None

    async def adopt(self, engine: LocalEngine) -> None:
        """An engine that has been started: it is met, and gets groups from now on."""
        self._engine = engine
        engine.listen_to_blocks(indexing(self._fleet.index, self.id))
        self._publish(self.id, engine)
        worker = Worker(self.id, engine, self._address(engine))
        await self._meet(worker)
        self._fleet.put(worker)

    async def keep(self) -> None:
        """Runs until it is cancelled, or the engine is given up. Owns no engine but the one the fleet knows."""
        in_a_row = 0
        while self._engine is not None:
            ready_s = self._clock()
            await self._engine.died.wait()
            logger.error("the process of %s (pid %s) died", self.id, self._engine.info.pid)
            self._fleet.mark(self.id, WorkerState.DEAD, "its process ended")
            await self._engine.close()  # what it leaves behind: its pipes and their folder
            if self._clock() - ready_s >= STEADY_S:
                in_a_row = 0
            in_a_row = await self._start_again(in_a_row)

    async def close(self) -> None:
        """For when `keep` has ended: an engine that was not given to the fleet any more ends too."""
        if self._engine is not None:
            await self._engine.close()

    async def _start_again(self, in_a_row: int) -> int:
        """Returns how many starts it took, with those before."""
        self._engine = None
        while in_a_row < self._restarts:
            await self._wait(backoff_s(in_a_row))
            in_a_row += 1
            self._fleet.mark(self.id, WorkerState.STARTING, f"start {in_a_row} of {self._restarts}")
            try:
                engine = await self._start_engine(self._config)
            except StartupError as error:
                self._fleet.mark(self.id, WorkerState.DEAD, f"it cannot start: {error.message}")
            else:
                self.restarted += 1
                await self.adopt(engine)
                return in_a_row
        logger.error("%s is not started again", self.id)
        self._fleet.give_up(self.id)
        self.given_up.set()
        return in_a_row


def backoff_s(in_a_row: int) -> float:
    """The first restart is quick, for what happened may have been an accident; 0.25, 0.5, 1, 2 ... 30 s."""
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**in_a_row)
