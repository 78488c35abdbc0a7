"""Two tasks of a replica with clients, beside its server: it requests missing prefill replicas, and ends open answers
in time when Serve is ending it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from motet.deploy.gateway import Gateway
from motet.deploy.ray.directory import Handle, answer
from motet.deploy.ray.running import ReplicaTasks, RunningServer
from motet.deploy.ray.worker import RayWorker
from motet.errors import MotetError
from motet.routing.choosing.prefill_plan import BypassReason

logger = logging.getLogger(__name__)

LOOK_S = 1.0
ASK_S = 2.0
"""Seconds between two health checks by Serve of a replica that holds streams of clients."""
OVERDUE_S = 2 * ASK_S
LEAST_S = 10.0
"""Least seconds without a health check that count: a busy controller may ask late."""


class ClientStreams:
    """Runs both tasks for one replica."""

    def __init__(
        self,
        server: RayWorker | RunningServer[Gateway],
        prefill: Handle | None,
        *,
        one_is_ended: Callable[[], Awaitable[bool]],
    ) -> None:
        """`prefill`: None if there is no prefill to request; `one_is_ended`: as in `Interest`."""
        self._server = server
        self._interest = Interest(one_is_ended)
        self._tasks = ReplicaTasks()
        self._tasks.begin(self._farewell(server.serving.service.config.drain_timeout_s))
        if prefill is not None:
            figures, reason = server.serving.workforce.router.figures, BypassReason.PREFILL_DOWN
            self._tasks.begin(call_for_prefill(lambda: figures().bypasses.get(reason, 0), partial(wake, prefill)))

    def check(self) -> None:
        """Answers Serve's health check. Raises EngineDiedError if the server or a task has ended."""
        self._interest.asked()
        self._server.check()
        self._tasks.check()

    async def close(self) -> None:
        await self._tasks.aclose()
        await self._server.close()

    async def _farewell(self, limit_s: float) -> None:
        await self._interest.lost(limit_s)
        logger.warning("Serve is ending this replica, and the time of its answers is up")
        await self._server.close(at_once=True)


class Interest:
    """Notices that Serve is ending this replica.

    Serve informs a replica only when its last request is over, and kills it if that takes too long: its streams would
    break without a word. But Serve checks the health only of replicas that will stay, and reports how many of a
    deployment are being ended. So if the checks stop while some replica is being ended, it is this one."""

    def __init__(
        self, one_is_ended: Callable[[], Awaitable[bool]], *, wait: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """`one_is_ended`: asks Serve if a replica of this deployment is being ended."""
        self._one_is_ended = one_is_ended
        self._wait = wait
        self._ever_asked = False
        self._unasked_s = 0.0

    def asked(self) -> None:
        """Called at each health check by Serve."""
        self._ever_asked = True
        self._unasked_s = 0.0

    async def lost(self, limit_s: float) -> None:
        """Returns once there was no health check for `limit_s` while Serve was ending some replica: a controller that
        is away or busy also checks late, but ends none. While checks come regularly, Serve is not asked."""
        limit_s = max(limit_s, LEAST_S)
        while self._unasked_s < limit_s:
            await self._wait(LOOK_S)
            if self._ever_asked and (self._unasked_s < OVERDUE_S or await self._one_is_ended()):
                self._unasked_s += LOOK_S


async def call_for_prefill(
    missed: Callable[[], int],
    wake: Callable[[], Awaitable[None]],
    *,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Starts prefill again that was scaled to zero and is needed, by calls that no request waits for, until cancelled.

    1. decode computes the prompt of a group for which prefill would have paid, and counts it: `prefill-down`
    2. that count has grown, so a call is made. Serve has no replica for it, keeps it, and starts a replica
    3. the call ends when the replica is there, which finds the others, and they it, as usual

    `missed` returns that count; `wake` returns when a replica is there, and raises MotetError.
    """
    seen = missed()
    while True:
        await wait(LOOK_S)
        if missed() == seen:
            continue
        logger.info("prefill is needed: a replica is requested")
        try:
            await wake()
        except MotetError as error:
            logger.warning("prefill cannot be started: %s", error.message)
        seen = missed()  # groups that came meanwhile could not wait for it


async def wake(prefill: Handle) -> None:
    """Returns when a prefill replica is there, however long that takes. Raises DirectoryError."""
    await answer(lambda: prefill.wake.remote(), "no replica is available")
