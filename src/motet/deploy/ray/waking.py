"""Prefill that has been scaled to zero is started again where it is missed, by a call that no request waits for.

1. a group that prefill would have paid for is computed by decode, and counted: `prefill-down`
2. that has become more: a call is made. Serve has none to give it to, keeps it, and starts a replica for it
3. the call ends when the replica is there, which finds and is found by everybody else as any other
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from motet.deploy.compose import Router
from motet.deploy.ray.handles import Handle, NoAnswerError, answer
from motet.errors import EngineError, MotetError
from motet.routing.bypass import BypassReason

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class Waker:
    """From when it is made, in an event loop, to `close`. One call at a time."""

    def __init__(
        self,
        missed: Callable[[], int],
        wake: Callable[[], Awaitable[None]],
        *,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`missed`: how many groups went without so far. `wake`: returns when a replica is there; raises MotetError."""
        self._missed = missed
        self._wake = wake
        self._wait = wait
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Twice changes nothing."""
        self._watching.cancel()
        await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        seen = self._missed()
        while True:
            await self._wait(LOOK_S)
            if self._missed() == seen:
                continue
            logger.info("prefill is missed: a replica is called for")
            try:
                await self._wake()
            except MotetError as error:
                logger.warning("prefill cannot be started: %s", error.message)
            seen = self._missed()  # what came meanwhile could not have been helped


async def wake(prefill: Handle) -> None:
    """Returns when a replica of prefill is there, however long that takes. Raises EngineError."""
    try:
        await answer(lambda: prefill.wake.remote())
    except NoAnswerError as error:
        raise EngineError(f"no replica can be had: {error}") from error


def missed_by(router: Router) -> Callable[[], int]:
    """Groups that prefill would have paid for while none of its workers was up."""
    return lambda: router.figures().bypasses.get(BypassReason.PREFILL_DOWN, 0)
