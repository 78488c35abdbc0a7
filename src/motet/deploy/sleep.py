"""A cell that sleeps: its engines give memory back to the system for a while, for a trainer on the same machine.

    sleep    1. the pause: groups end, are waited for, or are kept; new ones wait in the queue
             2. every engine gives back its KV cache, at level 2 its weights too
    wake     3. weights are read again from where they came, unless an update has brought them meanwhile
             4. when all is there, groups go on; those that were kept compute their KV anew

An engine that dies meanwhile and is started again sleeps as the others do (`CellWeights.bring`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from motet.deploy.weights import CellWeights
from motet.engine import Sleeping, SleepTag
from motet.errors import EngineClosedError, EngineDiedError, EngineError, RequestError, StartupError
from motet.types import PauseMode

logger = logging.getLogger(__name__)

MEMORY = frozenset((SleepTag.WEIGHTS, SleepTag.KV_CACHE))


class CellSleep:
    """Owned by the cell. Orders come one after the other, and are carried out whole if their caller leaves."""

    def __init__(self, weights: CellWeights) -> None:
        self._weights = weights
        self._state = weights.asleep

    @property
    def asleep(self) -> bool:
        return self._weights.paused or bool(self._state.tags)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Level 0 only pauses, 1 gives back the KV cache, 2 the weights too. Raises RequestError if engines cannot."""
        if level:
            self._check_possible()
        await self._weights.pause(mode)
        if level:
            await asyncio.shield(asyncio.ensure_future(self._sleep(weights=level > 1)))

    async def wake(self, tags: Collection[SleepTag]) -> bool:
        """Takes all memory again, or only that of these tags. Returns True if all is there, and groups go on. Raises
        EngineError if weights cannot be read again: then they can still be brought by an update."""
        return await asyncio.shield(asyncio.ensure_future(self._wake(MEMORY.intersection(tags) if tags else MEMORY)))

    async def let_groups_end(self) -> None:
        """Wakes all before the server stops: groups that were kept would not end. If that fails, they are cut."""
        try:
            await self.wake(())
        except EngineError as error:
            logger.error("the engines do not wake, so answers under way are cut: %s", error.message)

    async def _sleep(self, *, weights: bool) -> None:
        async with self._weights.lock:
            await self._weights.halt()  # somebody may have resumed it since the pause
            self._state.tags |= MEMORY
            self._state.weights_lost |= weights
            await self._all(lambda engine: engine.sleep(weights=weights))

    async def _wake(self, tags: Iterable[SleepTag]) -> bool:
        async with self._weights.lock:
            wanted = self._state.tags.intersection(tags)
            if SleepTag.WEIGHTS in wanted and self._state.weights_lost:
                await self._all(self._weights.bring_again)
                self._state.weights_lost = False
            if SleepTag.KV_CACHE in wanted:
                await self._all(lambda engine: engine.wake())
            self._state.tags -= wanted
            if not self._state.tags:
                await self._weights.go_on()
            return not self._state.tags

    async def _all(self, order: Callable[[Sleeping], Awaitable[None]]) -> None:
        """Gives all engines an order. One that dies is as the others when it is back."""
        answers = await asyncio.gather(*(order(engine) for engine in self._weights.there()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, StartupError | RequestError):
                raise EngineError(f"The weights cannot be read again: {answer.message}") from answer
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDiedError | EngineClosedError):
                raise answer

    def _check_possible(self) -> None:
        for engine in self._weights.there():
            if engine.info.device != "cpu":
                raise RequestError(
                    f"Invalid 'level': /sleep gives back memory of engines on the CPU only, and this one is on "
                    f"{engine.info.device}; level 0 pauses it.",
                    param="level",
                    code="unsupported_value",
                )
