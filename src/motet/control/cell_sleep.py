"""A cell that sleeps: its engines release memory to the system for a while, for a trainer on the same machine.

    sleep    1. the pause: groups end, are waited for, or are kept; new groups wait in the queue
             2. every engine releases its KV cache, at level 2 its weights too
    wake     3. the weights are read again from their checkpoints, unless an update has brought others
             4. when all memory is taken again, groups continue; kept groups recompute their KV

An engine that is restarted in between sleeps as the others do.
"""

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
    """What a sleeping engine has given up, in vLLM's words."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"
    """It computes nothing. Ends when all memory is taken again."""


MEMORY = frozenset((SleepTag.WEIGHTS, SleepTag.KV_CACHE))


class CellSleep:
    """The memory of a cell's engines. Owned by `EngineControl`. Orders come one after the other, and are carried out
    to their end if their caller leaves."""

    def __init__(
        self, engines: ControlledEngines, weights: WeightUpdates, *, pause: Callable[[PauseMode], Awaitable[None]]
    ) -> None:
        self._engines = engines
        self._weights = weights
        self._pause = pause
        self.tags: set[SleepTag] = set()
        """Memory that is released now; empty while the engines are awake."""

    @property
    def asleep(self) -> bool:
        """True while the engines compute nothing, even if they have released no memory."""
        return self._engines.paused or bool(self.tags)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pauses. Level 1 also releases KV caches, level 2 the weights too. Raises RequestError if engines cannot."""
        if level:
            self._check_possible()
        await self._pause(mode)
        if level:
            await asyncio.shield(asyncio.ensure_future(self._sleep(weights=level > 1)))

    async def wake(self, tags: Collection[SleepTag]) -> bool:
        """Takes the memory of these tags again; without tags, all of it. Returns True if nothing is released any more,
        and groups continue. Raises EngineError if the weights cannot be read again; an update can bring others."""
        return await asyncio.shield(asyncio.ensure_future(self._wake(MEMORY.intersection(tags) if tags else MEMORY)))

    async def let_groups_end(self) -> None:
        """Wakes all engines before the server stops, so that kept groups end. If that fails, they are aborted."""
        try:
            await self.wake(())
        except EngineError as error:
            logger.error("the engines do not wake, so running answers are cut: %s", error.message)

    async def bring(self, engine: ControlledEngine) -> None:
        """Lets an engine that joins sleep as the others do."""
        if self.tags:
            await engine.send(Sleep(weights=self._weights.lost))
            if SleepTag.KV_CACHE not in self.tags:
                await engine.send(Wake())

    async def _sleep(self, *, weights: bool) -> None:
        async with self._engines.lock:
            await self._engines.halt()  # a client may have ended the pause by now
            self.tags |= MEMORY
            self._weights.lost |= weights
            await self._give(lambda engine: engine.send(Sleep(weights)))

    async def _wake(self, tags: Iterable[SleepTag]) -> bool:
        async with self._engines.lock:
            waking = self.tags.intersection(tags)
            if SleepTag.WEIGHTS in waking and self._weights.lost:
                await self._give(self._weights.history.bring_again)
                self._weights.lost = False
            if SleepTag.KV_CACHE in waking:
                await self._give(lambda engine: engine.send(Wake()))
            self.tags -= waking
            if not self.tags:
                await self._engines.resume()
            return not self.tags

    async def _give(self, order: Callable[[ControlledEngine], Awaitable[object]]) -> None:
        try:
            await self._engines.give(order, to=self._engines.present(local_only=True))
        except (StartupError, RequestError) as error:
            raise EngineError(f"The weights cannot be read again: {error.message}") from error

    def _check_possible(self) -> None:
        for engine in self._engines.present(local_only=True):
            if engine.info.device != "cpu":
                raise RequestError(
                    f"Invalid 'level': /sleep releases memory of engines on the CPU only, and this one is on "
                    f"{engine.info.device}; level 0 pauses it.",
                    param="level",
                    code="unsupported_value",
                )
