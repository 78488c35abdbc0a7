"""A cell that sleeps: its engines release memory to the system temporarily, for a trainer on the same machine.

    sleep    1. the pause: running groups are aborted, finish first, or are kept; new groups wait in the queue
             2. every engine releases its KV cache and, at level 2, its weights
    wake     3. the weights are read again from their checkpoints, unless an update has replaced them
             4. when all memory is allocated again, groups continue; kept groups recompute their KV

An engine that is restarted while the cell sleeps sleeps too."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from enum import StrEnum

from motet.control.controlled_engines import ControlledEngines
from motet.control.weight_updates import WeightUpdates
from motet.engine import ControlledEngine
from motet.engine_orders import Sleep, Wake
from motet.errors import EngineError, RequestError, StartupError
from motet.types import PauseMode

logger = logging.getLogger(__name__)


class SleepTag(StrEnum):
    """The resources that a sleeping engine has released, with vLLM's names."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"
    """The engine computes nothing until all memory is allocated again."""


MEMORY = frozenset((SleepTag.WEIGHTS, SleepTag.KV_CACHE))


class CellSleep:
    """The memory of a cell's engines. Owned by `EngineControl`. Carries out one order at a time, to its end even if its
    caller disconnects."""

    def __init__(
        self, engines: ControlledEngines, weights: WeightUpdates, *, pause: Callable[[PauseMode], Awaitable[None]]
    ) -> None:
        self._engines = engines
        self._weights = weights
        self._pause = pause
        self.tags: set[SleepTag] = set()
        """The memory that is released now. Empty while the engines are awake."""

    @property
    def asleep(self) -> bool:
        """True while the engines compute nothing, even if they have released no memory."""
        return self._engines.paused or bool(self.tags)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pauses the engines. Level 1 also releases the KV caches, level 2 the weights too. Raises RequestError if the
        engines cannot release memory."""
        if level:
            self._check_possible()
        await self._pause(mode)
        if level:
            await asyncio.shield(self._sleep(weights=level > 1))

    async def wake(self, tags: Collection[SleepTag]) -> bool:
        """Allocates the memory of these tags again; without tags, all of it. Returns True if all memory is allocated,
        so that groups continue. Raises EngineError if the weights cannot be read again, before an update replaces
        them."""
        return await asyncio.shield(self._wake(MEMORY.intersection(tags) if tags else MEMORY))

    async def let_groups_end(self) -> None:
        """Wakes all engines before the server stops, so that kept groups can end. If that fails, they are aborted."""
        try:
            await self.wake(())
        except EngineError as error:
            logger.error("the engines do not wake, so running answers are cut: %s", error.message)

    async def sync(self, engine: ControlledEngine) -> None:
        """Makes an engine that joins sleep if the cell sleeps."""
        if self.tags:
            await engine.send(Sleep(weights=self._weights.lost))
            if SleepTag.KV_CACHE not in self.tags:
                await engine.send(Wake())

    async def _sleep(self, *, weights: bool) -> None:
        async with self._engines.lock:
            async with self._engines.step_lock:
                await self._engines.halt()  # a client can have ended the pause since
                self.tags |= MEMORY
            async with self._engines.weights_lock:
                self._weights.lost |= weights
                await self._give(lambda engine: engine.send(Sleep(weights)))

    async def _wake(self, tags: Iterable[SleepTag]) -> bool:
        if not self.tags:
            return await self._resume(())
        async with self._engines.lock:
            waking = self.tags.intersection(tags)
            if SleepTag.WEIGHTS in waking and self._weights.lost:
                await self._give(self._weights.history.restore)
                self._weights.lost = False
            if SleepTag.KV_CACHE in waking:
                await self._give(lambda engine: engine.send(Wake()))
            return await self._resume(waking)

    async def _resume(self, woken: Iterable[SleepTag]) -> bool:
        """Ends the pause if all other memory is allocated too. Returns True if it is."""
        async with self._engines.step_lock:
            self.tags.difference_update(woken)
            if not self.tags:
                await self._engines.resume()
            return not self.tags

    async def _give(self, order: Callable[[ControlledEngine], Awaitable[object]]) -> None:
        try:
            await self._engines.give(order, to=self._engines.connected(local_only=True))
        except (StartupError, RequestError) as error:
            raise EngineError(f"The weights cannot be read again: {error.message}") from error

    def _check_possible(self) -> None:
        for engine in self._engines.connected(local_only=True):
            if engine.info.device != "cpu":
                raise RequestError(
                    f"Invalid 'level': /sleep releases memory of engines on the CPU only, and this engine is on "
                    f"{engine.info.device}; level 0 pauses it.",
                    param="level",
                    code="unsupported_value",
                )
