"""Watches one worker elsewhere: asks it every second how it is, and reports to the fleet.

    starting ──first report──► met ──► ready ◄─────► draining       as its reports say, or an operator
                                        │ ▲
    no answer for a while: silent       │ │   it answers again: the same engine is ready again,
    refused, broken, its engine lost:   │ │   another one is met and takes its place
    dead                                ▼ │
    another protocol, or another model under the same name: dead, and its note says why
    a report or an answer that cannot be right: dead, with the reason, for some seconds; longer if it happens again
    a report that runs into a defect of ours: dead, with a traceback in the log; the other workers are not touched

When a worker is taken out, all its groups end here, so that they go on elsewhere at once; the server itself is not
touched.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from motet.deploy.block_events import Follow, WorkerEventFollower
from motet.engine import WorkerState
from motet.engines.server_engine import ServerEngine
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OverloadedError, WorkerFaultError
from motet.kv_events.follower import follow_blocks
from motet.routing.workers.fleet import Fleet

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
LONGEST_MISS = 2
"""A question without answer adds at most this many heartbeats to a silence: for the rest we did not listen."""
QUIET_S = 300.0
TAKEN_OUT = "an operator wants it so"
ENDS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""Whatever else a task raises is a defect. A library in Rust that panics raises no `Exception`."""
BUSY = 6
"""A worker that still sends tokens is busy, and its silence may last this many times as long."""


class KeptEngine(Protocol):
    """Our object for one start of a worker (`RemoteEngine`, `VLLMEngine`, `TextUpstream`)."""

    @property
    def engine_id(self) -> str:
        """The id that the worker got at that start."""
        ...

    def lost(self, error: MotetError) -> None:
        """Ends all groups and questions on the worker with `error`."""
        ...

    async def close(self) -> None: ...


class RemoteKeeper:
    """Watches one worker. `keep` may be cancelled at any time, and called again."""

    def __init__(
        self,
        id: str,
        url: str,
        *,
        report: Callable[[], Awaitable[EngineReport]],
        join: Callable[[EngineReport], Awaitable[KeptEngine]],
        problem: Callable[[EngineReport], str | None],
        gone: Callable[[], None] = lambda: None,
        fleet: Fleet,
        silence_s: float,
        quiet_s: float = QUIET_S,
        heartbeat_s: float = HEARTBEAT_S,
        follow: Follow = follow_blocks,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`report`: raises EngineSilentError, EngineDiedError, or another EngineError for an answer that makes no
        sense; `join`: adds a start of the worker to the fleet after its first report, raises EngineError if it cannot
        be used; `problem`: returns why a worker with this report cannot be used, None if it can, which holds until
        `gone` is called; `silence_s`: time without an answer after which it is given up, until it answers again;
        `quiet_s`: time for which it may send nothing of a group; `heartbeat_s`: time between two questions."""
        self.id = id
        self.url = url
        self.looked = asyncio.Event()
        """Set when the worker has been asked once, also if it did not answer."""
        self._report = report
        self._join = join
        self._problem = problem
        self._gone = gone
        self._fleet = fleet
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._quiet = EngineSilentError(f"{id} sent nothing of an answer for {quiet_s:g} s")
        self._quiet_looks = math.ceil(quiet_s / heartbeat_s)
        self._clock = clock
        self._wait = wait
        self._engine: KeptEngine | None = None
        self._events = WorkerEventFollower(id, fleet.cached_blocks, follow=follow)
        self._taken_out = False
        """True if an operator wants the worker to get no new groups."""
        self._unheard_s = 0.0
        """Seconds for which the worker has been silent while we listened."""
        self._listened_s = clock()
        """Time at which we listened last."""

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                begun_s = self._clock()
                try:
                    await self.look()
                except ENDS:
                    raise
                except BaseException:  # raised, it would end the tasks of all workers
                    logger.exception("%s: its report could not be taken", self.id)
                self.looked.set()
                await self._wait(max(0.0, begun_s + self._heartbeat_s - self._clock()))
        finally:
            await self._events.stop()

    async def look(self) -> None:
        """Asks once, and reports to the fleet what the answer, or its absence, means. Raises only for a defect.

        An answer that was asked for before a group found the worker dead says nothing of how it is now."""
        deaths = self._deaths
        try:
            report = await self._report()
            self._listened_s, self._unheard_s = self._clock(), 0.0
            if self._deaths != deaths:
                return
            await self._take(report)
            await self._fleet.end_silences(self.id, self._quiet, polls=self._quiet_looks)
        except MotetError as error:
            self._no_use(error)
        except ENDS:
            raise
        except BaseException as error:
            why = f"its report could not be taken ({type(error).__name__}: {error}): the log has more"
            self._out(WorkerState.DEAD, EngineDiedError(f"{self.id}: {why}"), heard=True)
            raise

    def take_out(self) -> None:
        """Gives the worker no new groups any more."""
        self._taken_out = True
        member = self._fleet.get(self.id)
        if member is not None and member.state is WorkerState.READY:
            self._fleet.mark(self.id, WorkerState.DRAINING, why=TAKEN_OUT)

    async def close(self) -> None:
        """Ends all groups and questions on the worker. Must be called after `keep` has ended."""
        self._gone()
        if self._engine is not None:
            await self._engine.close()

    @property
    def _deaths(self) -> int:
        """How often the worker has been found dead."""
        member = self._fleet.get(self.id)
        return 0 if member is None else member.faults.deaths

    def _no_use(self, error: MotetError) -> None:
        now_s = self._clock()
        passed_s, self._listened_s = now_s - self._listened_s, now_s
        match error:
            case EngineSilentError() | OverloadedError():  # this machine may have no file left for a connection
                missed_s = min(passed_s, LONGEST_MISS * self._heartbeat_s)
                self._unheard_s += missed_s / BUSY if self._sends_tokens() else missed_s
                if self._unheard_s >= self._silence_s:
                    why = f"{self.id} gives no sign of life for {self._silence_s:g} s"
                    self._out(WorkerState.SILENT, EngineSilentError(why))
            case WorkerFaultError():
                self._out(WorkerState.DEAD, error, heard=True)
            case EngineDiedError():
                self._out(WorkerState.DEAD, error)
            case _:
                self._out(WorkerState.DEAD, EngineDiedError(error.message), heard=True)

    def _sends_tokens(self) -> bool:
        """Returns True if anything of the worker's groups has come since the last call."""
        member = self._fleet.get(self.id)
        if member is None or not member.groups.received:
            return False
        member.groups.received = False
        return True

    async def _take(self, report: EngineReport) -> None:
        """Raises EngineError if the worker cannot be used."""
        if (former := self._engine) is not None and former.engine_id != report.engine_id:
            self._out(WorkerState.DEAD, EngineDiedError(f"{self.id} was started again"))
            self._engine = None  # nothing of the former start is left
            await former.close()
        member = self._fleet.get(self.id)
        if member is not None and member.faults.distrusted:
            raise WorkerFaultError(member.note)
        if problem := self._problem(report):
            raise EngineError(f"{self.id} cannot be used here: {problem}")
        if report.state is WorkerState.DEAD:
            raise EngineError(f"{self.id} has lost its engine")
        if self._engine is None:
            try:
                self._engine = await self._join(report)
            except EngineError as error:
                raise EngineError(f"{self.id} cannot be used here: {error.message}") from error
        elif isinstance(self._engine, ServerEngine) and self._engine.take_facts(report):
            self._fleet.note_weights(self.id)
        self._fleet.offer(self.id, report.models)
        self._mark_present(report)  # first of all, since a worker that drains must get no groups
        await self._events.follow(report)
        if report.stats is not None and member is not None:
            member.load.note_report(report.stats.choices_running + report.stats.choices_waiting)

    def _mark_present(self, report: EngineReport) -> None:
        """Marks the worker. It is ready even if its engine is silent in a long step: its own server ends a hang."""
        if self._taken_out:
            self._fleet.mark(self.id, WorkerState.DRAINING, why=TAKEN_OUT)
        elif report.state is WorkerState.DRAINING:
            self._fleet.mark(self.id, WorkerState.DRAINING, why="it is being stopped")
        else:
            self._fleet.mark(self.id, WorkerState.READY)

    def _out(self, state: WorkerState, error: EngineDiedError, *, heard: bool = False) -> None:
        """Marks the worker and ends its groups. A worker that has never been `heard` is still expected."""
        if self._engine is None and not heard:
            state = WorkerState.STARTING
        self._fleet.mark(self.id, state, why=error.message)
        self._gone()
        if self._engine is not None:
            self._engine.lost(error)
