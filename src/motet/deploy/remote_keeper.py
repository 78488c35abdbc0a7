"""The keeper of a worker on another server: requests its report every second, and updates the worker in the fleet.

    starting ── first report ──► joined ──► ready ◄──► draining    according to its reports, or by an operator
                                            │   ▲
                               silent, dead ▼   │ a report: the same engine is ready again, or a new engine joins

    silent    there was no answer for `silence_s`
    dead      the connection is refused or breaks, or the worker has lost its engine
              the report cannot be used (another protocol, another model under the same name): the note has the reason
              a report or an answer cannot be true: for some seconds, and longer if it happens again
              processing the report revealed a defect of Motet: the log has the traceback

The groups of a silent or dead worker end in this process, so that they continue on other workers at once."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from motet.deploy.block_events import Follow, WorkerEventFollower
from motet.engine import WorkerState
from motet.engines.server_engine import ServerEngine
from motet.engines.upstream.text_upstream import TextUpstream
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OverloadedError, WorkerFaultError
from motet.kv_events.follower import follow_blocks
from motet.routing.workers.fleet import Fleet

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MAX_COUNTED_HEARTBEATS = 2
"""Maximum number of heartbeat periods that an unanswered request adds to a silence. A longer time is not counted: it
shows that this process itself did not run."""
STALL_S = 300.0
TAKEN_OUT = "an operator drains it"
ENDS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task on purpose. All others are defects, including the panic of a Rust library, whose exception
is not derived from `Exception`."""
BUSY = 6
"""Multiple of `silence_s` that is allowed to a worker that sends tokens during this time, because it is busy."""

KeptEngine = ServerEngine[Any] | TextUpstream
"""The engine object of one worker process. A worker that was restarted gets another one."""


@dataclass(frozen=True)
class WorkerCalls:
    """The calls with which a keeper watches its worker."""

    report: Callable[[], Awaitable[EngineReport]]
    """Requests a report. Raises EngineSilentError, EngineDiedError, or another EngineError for an invalid answer."""
    problem: Callable[[EngineReport], str | None]
    """Returns the reason why a worker with this report cannot be used; None if it can, until `left` is called."""
    join: Callable[[EngineReport], Awaitable[KeptEngine]]
    """Puts the worker in the fleet after each of its starts. Raises EngineError if it cannot be used."""
    left: Callable[[], None] = lambda: None
    """Called when the worker is lost or closed."""


@dataclass(frozen=True)
class KeeperLimits:
    """Time limits for one worker, in seconds."""

    silence_s: float
    """Time without an answer after which the worker is silent, until it answers again."""
    stall_s: float = STALL_S
    """Maximum time for which the worker can send nothing of a running group."""
    heartbeat_s: float = HEARTBEAT_S
    """Time between two requests for a report."""


class SilenceTimer:
    """Measures the time for which a worker has not answered, without times during which this process did not run."""

    def __init__(self, limits: KeeperLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._silent_s = 0.0
        self._last_s = clock()
        """Time of the last request, answered or not."""

    def answered(self) -> None:
        self._last_s, self._silent_s = self._clock(), 0.0

    def failed(self) -> None:
        """Called after a request that failed without a time-out."""
        self._last_s = self._clock()

    def unanswered(self, *, is_busy: bool) -> bool:
        """Returns True if the worker counts as silent after this unanswered request."""
        now_s = self._clock()
        added_s = min(now_s - self._last_s, MAX_COUNTED_HEARTBEATS * self._limits.heartbeat_s)
        self._last_s = now_s
        self._silent_s += added_s / BUSY if is_busy else added_s
        return self._silent_s >= self._limits.silence_s


class RemoteKeeper:
    """Watches one worker. `keep` can be cancelled at any time, and called again."""

    def __init__(
        self,
        id: str,
        url: str,
        *,
        calls: WorkerCalls,
        fleet: Fleet,
        limits: KeeperLimits,
        follow: Follow = follow_blocks,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.id = id
        self.url = url
        self.checked = asyncio.Event()
        """Set when a report has been requested once, even if there was no answer."""
        self._calls = calls
        self._fleet = fleet
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._silence = SilenceTimer(limits, clock)
        self._engine: KeptEngine | None = None
        self._events = WorkerEventFollower(id, fleet.cached_blocks, follow=follow)
        self._taken_out = False
        """True if the worker gets no new groups, because an operator drains it or it leaves."""

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                started_s = self._clock()
                try:
                    await self.check()
                except ENDS:
                    raise
                except BaseException:  # else it would end the tasks of all workers
                    logger.exception("%s: its report could not be used", self.id)
                self.checked.set()
                await self._sleep(max(0.0, started_s + self._limits.heartbeat_s - self._clock()))
        finally:
            await self._events.stop()

    async def check(self) -> None:
        """Requests a report, and updates the fleet according to the result. Raises only for a defect."""
        deaths = self._deaths
        try:
            report = await self._calls.report()
            self._silence.answered()
            if self._deaths != deaths:  # a group found the worker dead after the request: the report can be older
                return
            await self._apply(report)
            stalled = EngineSilentError(f"{self.id} sent nothing of an answer for {self._limits.stall_s:g} s")
            polls = math.ceil(self._limits.stall_s / self._limits.heartbeat_s)
            await self._fleet.end_silences(self.id, stalled, polls=polls)
        except MotetError as error:
            self._lose(error)
        except ENDS:
            raise
        except BaseException as error:
            reason = f"its report could not be used ({type(error).__name__}: {error}): see the log"
            self._take_down(WorkerState.DEAD, EngineDiedError(f"{self.id}: {reason}"), was_reached=True)
            raise

    def take_out(self) -> None:
        """Lets the worker get no new groups from now on."""
        self._taken_out = True
        member = self._fleet.get(self.id)
        if member is not None and member.state is WorkerState.READY:
            self._fleet.mark(self.id, WorkerState.DRAINING, why=TAKEN_OUT)

    async def close(self) -> None:
        """Ends all groups of the worker, and all calls to it. Must be called after `keep` has ended."""
        self._calls.left()
        if self._engine is not None:
            await self._engine.close()

    @property
    def _deaths(self) -> int:
        """Number of times that the worker has been found dead."""
        member = self._fleet.get(self.id)
        return 0 if member is None else member.faults.deaths

    def _lose(self, error: MotetError) -> None:
        """Updates the fleet after a failed request, or a report with which the worker cannot be used."""
        # An OverloadedError means that this machine has no file descriptor left for a connection.
        if isinstance(error, EngineSilentError | OverloadedError):
            if self._silence.unanswered(is_busy=self._sends_tokens()):
                self._take_down_silent()
            return
        self._silence.failed()
        match error:
            case WorkerFaultError():
                self._take_down(WorkerState.DEAD, error, was_reached=True)
            case EngineDiedError():
                self._take_down(WorkerState.DEAD, error)
            case _:
                self._take_down(WorkerState.DEAD, EngineDiedError(error.message), was_reached=True)

    def _take_down_silent(self) -> None:
        """Updates the fleet after a long silence. A server accepts connections before its model is loaded, so a worker
        that was not ready before is not reported as one that was lost."""
        seconds, member = f"{self._limits.silence_s:g} s", self._fleet.get(self.id)
        state = WorkerState.STARTING if member is None else member.state
        if state in (WorkerState.STARTING, WorkerState.DEAD):
            reason = f"no answer for {seconds}; a server that starts answers when its model is loaded"
            self._take_down(state, EngineSilentError(reason))
        else:
            reason = f"{self.id} has sent no heartbeat for {seconds}"
            self._take_down(WorkerState.SILENT, EngineSilentError(reason))

    def _sends_tokens(self) -> bool:
        """Returns True if the worker has sent anything of its groups since the last call."""
        if (member := self._fleet.get(self.id)) is None:
            return False
        received, member.groups.received = member.groups.received, False
        return received

    async def _apply(self, report: EngineReport) -> None:
        """Applies a report. Raises EngineError if the worker cannot be used."""
        if (previous := self._engine) is not None and previous.engine_id != report.engine_id:
            self._take_down(WorkerState.DEAD, EngineDiedError(f"{self.id} has restarted"))
            self._engine = None  # nothing of the previous start is left
            await previous.close()
        member = self._fleet.get(self.id)
        if member is not None and member.faults.distrusted:
            raise WorkerFaultError(member.note)
        if problem := self._calls.problem(report):
            raise EngineError(f"{self.id} cannot be used here: {problem}")
        if report.state is WorkerState.DEAD:
            raise EngineError(f"{self.id} has lost its engine")
        if self._engine is None:
            try:
                self._engine = await self._calls.join(report)
            except EngineError as error:
                raise EngineError(f"{self.id} cannot be used here: {error.message}") from error
        elif isinstance(self._engine, ServerEngine) and self._engine.take_facts(report):
            self._fleet.record_worker_weights(self.id)
        self._fleet.set_models(self.id, report.models)
        self._mark_present(report)  # before the rest, since a worker that drains must get no groups
        await self._events.follow(report)
        if report.stats is not None and member is not None:
            member.load.record_report(report.stats.choices_running + report.stats.choices_waiting)

    def _mark_present(self, report: EngineReport) -> None:
        """Marks the worker. It is ready even if its engine is silent in a long step: its own server ends a hang."""
        if self._taken_out or report.state is WorkerState.DRAINING:
            why = TAKEN_OUT if self._taken_out else "it is being stopped"
            self._fleet.mark(self.id, WorkerState.DRAINING, why=why)
        else:
            self._fleet.mark(self.id, WorkerState.READY)

    def _take_down(self, state: WorkerState, error: EngineDiedError, *, was_reached: bool = False) -> None:
        """Marks the worker and ends its groups. A worker that has never been reached stays in the state STARTING."""
        if self._engine is None and not was_reached:
            state = WorkerState.STARTING
        self._fleet.mark(self.id, state, why=error.message)
        self._calls.left()
        if self._engine is not None:
            self._engine.lost(error)
