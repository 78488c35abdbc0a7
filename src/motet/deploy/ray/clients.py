"""Tasks of a replica with clients' streams: requesting prefill replicas, and ending answers before Serve kills it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from motet.deploy.gateway import Gateway
from motet.deploy.ray.directory import Handle, call_replica
from motet.deploy.ray.running_server import ReplicaTasks, RunningServer
from motet.deploy.ray.worker import RayWorker
from motet.errors import MotetError
from motet.routing.choosing.prefill_plan import BypassReason

logger = logging.getLogger(__name__)

POLL_S = 1.0
HEALTH_CHECK_S = 2.0
"""Time between two health checks by Serve of a replica that holds streams of clients."""
OVERDUE_S = 2 * HEALTH_CHECK_S
MIN_UNCHECKED_S = 10.0
"""Minimum time without a health check after which a replica ends: a busy controller can be late."""


class ClientStreams:
    """The two tasks of one replica, and its health check."""

    def __init__(
        self,
        server: RayWorker | RunningServer[Gateway],
        prefill: Handle | None,
        *,
        any_ending: Callable[[], Awaitable[bool]],
    ) -> None:
        """`prefill`: None if the cell has no prefill replicas; `any_ending`: as in `EndDetector`."""
        self._server = server
        self._end_detector = EndDetector(any_ending)
        self._tasks = ReplicaTasks()
        self._tasks.start(self._end_with_replica(server.serving.service.config.drain_timeout_s))
        if prefill is not None:
            figures, reason = server.serving.workforce.router.figures, BypassReason.PREFILL_DOWN
            self._tasks.start(request_prefill(lambda: figures().bypasses.get(reason, 0), partial(wake, prefill)))

    def check(self) -> None:
        """Answers Serve's health check. Raises EngineDiedError if the server or a task has ended."""
        self._end_detector.record_health_check()
        self._server.check()
        self._tasks.check()

    async def close(self) -> None:
        await self._tasks.aclose()
        await self._server.close()

    async def _end_with_replica(self, limit_s: float) -> None:
        await self._end_detector.wait(limit_s)
        logger.warning("Serve is ending this replica, and the time for its answers is over")
        await self._server.close(at_once=True)


class EndDetector:
    """Detects that Serve is ending this replica.

    Serve informs a replica only after its last request has ended, and kills it if that takes too long: its streams
    would break off without an error event. But Serve checks the health only of replicas that stay, and reports how many
    replicas of a deployment it is ending. So if the checks stop while Serve is ending a replica, it is this one."""

    def __init__(
        self, any_ending: Callable[[], Awaitable[bool]], *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """`any_ending`: queries Serve, and returns True if it is ending a replica of this deployment."""
        self._any_ending = any_ending
        self._sleep = sleep
        self._ever_checked = False
        self._unchecked_s = 0.0

    def record_health_check(self) -> None:
        """Called at each health check by Serve."""
        self._ever_checked = True
        self._unchecked_s = 0.0

    async def wait(self, limit_s: float) -> None:
        """Returns after `limit_s` without a health check, counted only while Serve is ending a replica: a busy or
        restarting controller also checks late, but ends none. Queries Serve only while a check is overdue."""
        limit_s = max(limit_s, MIN_UNCHECKED_S)
        while self._unchecked_s < limit_s:
            await self._sleep(POLL_S)
            if self._ever_checked and (self._unchecked_s < OVERDUE_S or await self._any_ending()):
                self._unchecked_s += POLL_S


async def request_prefill(
    missed: Callable[[], int],
    wake: Callable[[], Awaitable[None]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Makes Serve start a prefill replica when groups need one and there is none. Runs until it is cancelled.

    1. decode computes the prompt of a group for which prefill would have paid, and counts it as `prefill-down`
    2. the count has increased, so a call is made. Serve has no replica for the call, keeps it, and starts a replica
    3. the call returns when the replica has started. The replica connects to the others as any new replica

    No request waits for the call. `missed` returns the count; `wake` makes the call, and raises MotetError."""
    known = missed()
    while True:
        await sleep(POLL_S)
        if missed() == known:
            continue
        logger.info("groups need prefill: requesting a replica")
        try:
            await wake()
        except MotetError as error:
            logger.warning("no prefill replica can be started: %s", error.message)
        known = missed()  # groups that arrived during the call could not use the new replica


async def wake(prefill: Handle) -> None:
    """Waits without a limit until there is a prefill replica. Raises DirectoryError."""
    await call_replica(lambda: prefill.wake.remote(), "no replica is available")
