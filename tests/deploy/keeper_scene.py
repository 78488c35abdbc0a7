"""A scripted worker on another server, and its keeper with a clock that the test advances."""

import asyncio
from collections.abc import Iterator
from itertools import repeat

from motet.deploy.remote_keeper import KeeperLimits, RemoteKeeper, WorkerCalls
from motet.engine import Worker, WorkerState
from motet.engines.server_engine import ServerEngine, ServerGroup
from motet.engines.wire import EngineReport
from motet.errors import MotetError
from motet.kv_events.changes import BlockListener, Stored
from motet.kv_events.follower import BlockSource
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.types import Role

ID, URL = "10.0.0.1:8000", "http://10.0.0.1:8000"
SILENCE_S = 5.0


def report(
    engine_id: str = "first", state: WorkerState = WorkerState.READY, *, block_events: str | None = None
) -> EngineReport:
    return EngineReport(version="0", engine_id=engine_id, state=state, info=fake_info(), block_events=block_events)


class FakeFollower:
    """Replaces the follower of a worker's blocks: it reports one block, and runs until it is cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sources: list[str] = []
        self.replays: list[str | None] = []
        self.open = 0
        self.started = asyncio.Semaphore(0)
        self._error = error

    async def __call__(self, source: BlockSource, listener: BlockListener) -> None:
        self.sources.append(source.endpoint)
        self.replays.append(source.replay)
        self.open += 1
        listener([Stored((b"name",), None, ())])
        self.started.release()
        try:
            if self._error is not None:
                raise self._error
            await asyncio.Event().wait()
        finally:
            self.open -= 1


class FakeKeptEngine(ServerEngine[ServerGroup]):
    """An engine that records the errors with which it was lost. It gets no groups."""

    def __init__(self, report: EngineReport) -> None:
        super().__init__(URL, report)
        self.losses: list[MotetError] = []
        self.closed = False
        engine = FakeEngine(lambda *_: [0])
        self.generate, self.prefill, self.release = engine.generate, engine.prefill, engine.release
        self.stop_choice, self.stats = engine.stop_choice, engine.stats

    def lost(self, error: MotetError) -> None:
        self.losses.append(error)

    async def close(self) -> None:
        self.closed = True


class KeeperScene:
    """A keeper whose requests get `answers`, one after the other. Sleeping and answering advance the clock."""

    def __init__(self, *, role: Role | None = None) -> None:
        self.now_s = 100.0
        self.fleet = Fleet(clock=lambda: self.now_s)
        self.engines: list[FakeKeptEngine] = []
        self.joined: list[Worker] = []
        self.problem: str | None = None
        self.join_error: BaseException | None = None
        self.answers: Iterator[EngineReport | BaseException] = iter(())
        self.answer_takes_s: Iterator[float] = repeat(0.0)
        self.requested_s: list[float] = []
        self.follows = FakeFollower()
        self.fleet.expect(ID, URL, role=role)
        self.keeper = RemoteKeeper(
            ID,
            URL,
            calls=WorkerCalls(report=self._report, problem=lambda _: self.problem, join=self._join),
            fleet=self.fleet,
            limits=KeeperLimits(silence_s=SILENCE_S),
            follow=self.follows,
            clock=lambda: self.now_s,
            sleep=self._sleep,
        )

    @property
    def member(self) -> Member:
        member = self.fleet.get(ID)
        assert member is not None
        return member

    def state(self) -> WorkerState:
        return self.member.state

    @property
    def engine(self) -> FakeKeptEngine:
        """Returns the engine that was made last."""
        return self.engines[-1]

    async def check(self, *answers: EngineReport | MotetError, each_s: float = 1.0) -> None:
        """Lets the keeper check the worker once for each answer, `each_s` after the previous check."""
        self.answers = iter(answers)
        for _ in answers:
            self.now_s += each_s
            await self.keeper.check()

    async def _report(self) -> EngineReport:
        self.requested_s.append(self.now_s)
        self.now_s += next(self.answer_takes_s)
        answer = next(self.answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _join(self, report: EngineReport) -> FakeKeptEngine:
        if self.join_error is not None:
            raise self.join_error
        self.engines.append(FakeKeptEngine(report))
        worker = Worker(ID, self.engine, URL, local=False)
        self.joined.append(worker)
        self.fleet.put(worker)
        return self.engine

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
