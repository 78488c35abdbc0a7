"""Looks after one worker elsewhere: asks it every second how it is, and lets the fleet know.

    starting ──first report──► met ──► ready ◄─────► draining       as its reports say, or an operator
                                        │ ▲
    no answer for a while: silent       │ │   it answers again: the same engine is ready again,
    refused, broken, its engine lost:   │ │   another one is met and takes its place
    dead                                ▼ │
    another protocol, or another model under the same name: dead, and it is said why

Whatever takes it out ends what it has under way, so that groups go on elsewhere at once; nothing is done to the server
itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from motet.deploy.event_following import EventFollowing, Follow
from motet.engines.base import WorkerState
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError
from motet.kv_events.follower import follow_blocks
from motet.routing.fleet import Fleet

HEARTBEAT_S = 1.0
LONGEST_MISS = 2
"""Heartbeats that an unanswered question adds to a silence at most: if more time has passed, we did not listen."""
BUSY = 6
"""So many times as long a silence is borne from a worker whose tokens still come: it is busy. Not for ever, for what
comes may have been on its way for long."""


class Kept(Protocol):
    """One start of a worker, as we have dealings with it (`RemoteEngine`, `VLLMEngine`, `TextUpstream`)."""

    @property
    def engine_id(self) -> str:
        """Of that start."""
        ...

    def lost(self, error: MotetError) -> None:
        """Ends all it has under way with `error`."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class KeptServer:
    """How a worker is asked."""

    url: str
    report: Callable[[], Awaitable[EngineReport]]
    """Raises EngineSilentError, EngineDiedError, or another EngineError if there is no understanding."""
    join: Callable[[EngineReport], Awaitable[Kept]]
    """Takes a start of it into the fleet, by its first report. Raises EngineError if it cannot be used."""


@dataclass(frozen=True)
class KeeperRules:
    """What a keeper goes by."""

    problem: Callable[[EngineReport], str | None]
    """Why a worker that reports so cannot be used; None: it can."""
    silence_s: float
    """Without an answer for so long it is given up, until it answers again."""
    heartbeat_s: float = HEARTBEAT_S
    """Between questions."""
    follow: Follow = follow_blocks
    """How block events are followed."""


class RemoteKeeper:
    """One worker. `keep` may be cancelled at any time, and called again."""

    def __init__(
        self,
        id: str,
        server: KeptServer,
        *,
        fleet: Fleet,
        rules: KeeperRules,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.id = id
        self.url = server.url
        self.looked = asyncio.Event()
        """Set when it has been asked once, whatever came of it."""
        self._server = server
        self._fleet = fleet
        self._rules = rules
        self._clock = clock
        self._wait = wait
        self._engine: Kept | None = None
        self._events = EventFollowing(id, fleet.index, rules.follow)
        self._taken_out = False
        """An operator wants it to get no new groups."""
        self._unheard_s = 0.0
        """How long it has been silent, as far as we listened."""
        self._listened_s = clock()
        """When we listened last."""

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                begun_s = self._clock()
                await self.look()
                self.looked.set()
                await self._wait(max(0.0, begun_s + self._rules.heartbeat_s - self._clock()))
        finally:
            await self._events.stop()

    async def look(self) -> None:
        """Asks once, and draws the consequences."""
        try:
            report = await self._server.report()
        except MotetError as error:
            self._not_understood(error)
        else:
            self._listened_s, self._unheard_s = self._clock(), 0.0
            await self._take(report)

    def take_out(self) -> None:
        """It gets no new groups any more."""
        self._taken_out = True
        member = self._fleet.get(self.id)
        if member is not None and member.state is WorkerState.READY:
            self._fleet.mark(self.id, WorkerState.DRAINING, "an operator wants it so")

    async def close(self) -> None:
        """For when `keep` has ended. What the worker still has of ours ends."""
        if self._engine is not None:
            await self._engine.close()

    def _not_understood(self, error: MotetError) -> None:
        now_s = self._clock()
        passed_s, self._listened_s = now_s - self._listened_s, now_s
        match error:
            case EngineSilentError():
                missed_s = min(passed_s, LONGEST_MISS * self._rules.heartbeat_s)
                self._unheard_s += missed_s / BUSY if self._stirs() else missed_s
                if self._unheard_s >= self._rules.silence_s:
                    why = f"{self.url} gives no sign of life for {self._rules.silence_s:g} s"
                    self._out(WorkerState.SILENT, EngineSilentError(why))
            case EngineDiedError():
                self._out(WorkerState.DEAD, error)
            case _:
                self._out(WorkerState.DEAD, EngineDiedError(error.message), heard=True)

    def _stirs(self) -> bool:
        """Whether anything of its groups has come since it was looked at last."""
        member = self._fleet.get(self.id)
        if member is None or not member.stirred:
            return False
        member.stirred = False
        return True

    async def _take(self, report: EngineReport) -> None:
        if problem := self._rules.problem(report):
            self._out(WorkerState.DEAD, EngineDiedError(f"{self.url} is of no use here: {problem}"), heard=True)
        elif report.state is WorkerState.DEAD:
            self._out(WorkerState.DEAD, EngineDiedError(f"{self.url} has lost its engine"), heard=True)
        else:
            if (self._engine is None or self._engine.engine_id != report.engine_id) and not await self._adopt(report):
                return
            self._fleet.offer(self.id, report.models)
            self._mark_present(report)  # before anything waits: one that drains is not to be given groups
            await self._events.follow(report)
            if report.stats is not None and (member := self._fleet.get(self.id)):
                member.reported(report.stats.choices_running + report.stats.choices_waiting)

    async def _adopt(self, report: EngineReport) -> bool:
        """A worker that was started again is another one: nothing of the former is left. False: it cannot be used."""
        if (former := self._engine) is not None:
            self._out(WorkerState.DEAD, EngineDiedError(f"{self.url} was started again"))
            self._engine = None
            await former.close()
        try:
            self._engine = await self._server.join(report)
        except EngineError as error:
            self._out(WorkerState.DEAD, EngineDiedError(f"{self.url} is of no use here: {error.message}"), heard=True)
            return False
        return True

    def _mark_present(self, report: EngineReport) -> None:
        """One that is in a long step reports that its engine is silent; its own server ends it if it hangs."""
        if self._taken_out:
            self._fleet.mark(self.id, WorkerState.DRAINING, "an operator wants it so")
        elif report.state is WorkerState.DRAINING:
            self._fleet.mark(self.id, WorkerState.DRAINING, "it is being stopped")
        else:
            self._fleet.mark(self.id, WorkerState.READY)

    def _out(self, state: WorkerState, error: EngineDiedError, *, heard: bool = False) -> None:
        """One that nobody has `heard` of yet is still expected."""
        if self._engine is None and not heard:
            state = WorkerState.STARTING
        self._fleet.mark(self.id, state, error.message)
        if self._engine is not None:
            self._engine.lost(error)
