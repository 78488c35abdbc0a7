"""How a replica that holds streams of clients notices that Serve is ending it.

Serve tells a replica only when its last request is over, and kills it when that takes too long: its streams would break
without a word. But it asks only replicas that are to stay how they are, and says how many of a deployment are being
ended. So one that is not asked any more while one like it is being ended is the one, and tells its clients in time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

LOOK_S = 1.0
ASK_S = 2.0
"""Between two questions of Serve for the health of such a replica."""
OVERDUE_S = 2 * ASK_S
LEAST_S = 10.0
"""A controller that has much to do may ask late."""


class Interest:
    """Of Serve, in this replica."""

    def __init__(
        self,
        one_is_ended: Callable[[], Awaitable[bool]],
        *,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`one_is_ended`: whether Serve says so of a replica of this deployment."""
        self._one_is_ended = one_is_ended
        self._wait = wait
        self._ever_asked = False
        self._unasked_s = 0.0

    def asked(self) -> None:
        """Serve has asked how the replica is."""
        self._ever_asked = True
        self._unasked_s = 0.0

    async def lost(self, limit_s: float) -> None:
        """Returns once Serve has not asked for so long, in which it was ending somebody. A controller that is away, was
        just started again or has much to do asks late, and ends nobody by that. Whom it asks regularly does not ask it
        in turn."""
        limit_s = max(limit_s, LEAST_S)
        while self._unasked_s < limit_s:
            await self._wait(LOOK_S)
            if self._ever_asked and (self._unasked_s < OVERDUE_S or await self._one_is_ended()):
                self._unasked_s += LOOK_S


class Farewell:
    """Ends what is open in a replica in time, if Serve is ending it."""

    def __init__(self, interest: Interest, limit_s: float, end: Callable[[], Awaitable[None]]) -> None:
        """`limit_s`: how long answers under way have; `end` ends them, each with an error event."""
        self._saying = asyncio.create_task(self._say(interest, limit_s, end))

    async def close(self) -> None:
        self._saying.cancel()
        await asyncio.wait([self._saying])

    async def _say(self, interest: Interest, limit_s: float, end: Callable[[], Awaitable[None]]) -> None:
        await interest.lost(limit_s)
        logger.warning("Serve is ending this replica, and the time of its answers is up")
        await end()
