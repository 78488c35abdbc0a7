"""A server with real engine processes in the test's own loop: tests ask it over HTTP, look into it and strike it.

A test fails if it leaves groups in the books, blocks, leases, places at the door, processes, folders or tasks.
"""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

import httpx
import msgspec
import psutil

from motet.deploy.cell import Cell
from motet.deploy.server import Outcome, Serving, run_server
from motet.deploy.server_plan import ServerPlan
from motet.deploy.shutdown import StopSignals, first_of
from motet.engine import ANSWERING, WorkerState
from motet.engines.native.spawn import Spawn
from motet.errors import WorkerLeavingError
from motet.metrics.routing import RoutingFigures
from motet.metrics.stats import EngineStats
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.routing.workers.serving import WorkKind
from motet.settings.server_config import CellConfig, RoutingConfig, ServerConfig
from tests.fault.answers import Answer, Body, ask
from tests.fault.striking import Blow, Point, Strikes, StruckEngine, start_struck
from tests.patience import PATIENCE_S
from tests.tiny_engine import engine_config

SECONDS = PATIENCE_S
"""Time after which a cell is whole again, whatever was done to it."""
PATIENT = {"lease_s": 6 * SECONDS, "heartbeat_timeout_s": 60.0}
"""With these a forgotten lease does not end by itself, and no engine counts as dead because the machine was busy."""
APART = CellConfig(prefill=1, decode=2, bypass_tokens=0)
TOGETHER = CellConfig(decode=2)
OFTEN = RoutingConfig(engine_restarts=50, migration_wait_s=SECONDS)


class RunningCell:
    """A server that runs while the `async with` lasts."""

    def __init__(
        self,
        folder: Path,
        *,
        cell: CellConfig = APART,
        routing: RoutingConfig = OFTEN,
        server: dict[str, object] | None = None,
        spawn: Spawn,
        **engine: object,
    ) -> None:
        """`spawn` starts engine processes; `engine` has settings beside those for tiny models."""
        self.strikes = Strikes()
        self._start = partial(start_struck, strikes=self.strikes, spawn=spawn)
        self.signals = StopSignals()
        self._plan = ServerPlan(
            engine_config(folder, **{**PATIENT, **engine}),
            msgspec.convert({"served_model_name": "tiny", "port": 0, **(server or {})}, ServerConfig),
            tokenizer_path=folder,
            chat_template=None,
            cell=cell,
            routing=routing,
            death_linger_s=SECONDS,
            longest_backoff_s=0.05,
        )
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._processes = set(processes())
        self._folders = set(folders())
        self._blows: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "RunningCell":
        self._running = asyncio.ensure_future(
            run_server(self._plan, start_engine=self._start, on_ready=self._on_ready, signals=self.signals)
        )
        await asyncio.wait((self._running, self._ready), return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            self._running.result()
        self.http = httpx.AsyncClient(base_url=self._ready.result(), timeout=SECONDS)
        self._tasks = len(asyncio.all_tasks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signals.ask()
        if error is not None:
            self.signals.ask()
        try:
            await self.outcome()
            assert set(processes()) <= self._processes
            assert set(folders()) <= self._folders
        finally:
            await self.http.aclose()

    async def outcome(self) -> Outcome:
        """Returns how the server ended. A server that drains first waits for every group that it let in."""
        return await asyncio.wait_for(asyncio.shield(self._running), SECONDS)

    @property
    def url(self) -> str:
        return self._ready.result()

    @property
    def router(self) -> Router:
        return self._cell.router

    @property
    def fleet(self) -> Fleet:
        return self.router.fleet

    @property
    def figures(self) -> RoutingFigures:
        return self._cell.router.figures()

    @property
    def moved(self) -> int:
        """Number of times that a group had to go elsewhere."""
        return sum(self.figures.migrations.values())

    def engine(self, id: str) -> StruckEngine:
        worker = self._member(id).worker
        assert worker is not None
        assert isinstance(worker.engine, StruckEngine)
        return worker.engine

    async def stats(self, id: str) -> EngineStats:
        return await self.engine(id).stats(check=True)

    @property
    def decoding(self) -> list[StruckEngine]:
        """Returns the engines that are there and decode."""
        return [self.engine(member.id) for member in self.fleet.catalog.ready(WorkKind.GENERATE)]

    def id_of(self, engine: StruckEngine) -> str:
        return next(member.id for member in self.fleet.members if member.worker and member.worker.engine is engine)

    def leave(self, engine: StruckEngine) -> None:
        """A blow: the worker leaves, and its groups are told to go elsewhere."""
        id = self.id_of(engine)
        self.fleet.mark(id, WorkerState.DRAINING)
        engine.leaving = asyncio.create_task(self.fleet.evict(id, WorkerLeavingError(f"{id} is leaving")))
        self._blows.append(engine.leaving)

    def on_all(self, blow: Blow) -> Blow:
        """Makes a blow that falls on every engine that decodes, no matter which one reached the point."""

        def fall(_: StruckEngine) -> None:
            for engine in self.decoding:
                blow(engine)

        return fall

    @contextmanager
    def all_on(self, id: str) -> Iterator[None]:
        """Sends every group that comes meanwhile to that worker."""
        others = [member.id for member in self.fleet.members if member.id.startswith("decode") and member.id != id]
        for other in others:
            self.fleet.mark(other, WorkerState.DRAINING)
        yield
        for other in others:
            self.fleet.mark(other, WorkerState.READY)

    async def ask_on(self, id: str, route: str, body: Body, *, point: Point, blow: Blow) -> Answer:
        """Asks for a group that is struck on that worker. It may go on on any other."""
        with self.all_on(id):
            strike = self.strikes.arm(point, blow)
            asking = asyncio.create_task(ask(self.http, route, body))
            await first_of(strike.fallen.wait(), asyncio.wait([asking]))
        return await asking

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for the condition, and looks whenever the fleet changes."""
        async with asyncio.timeout(SECONDS):
            while not holds():
                changed = self.fleet.changes.wait()
                try:
                    await changed
                finally:
                    changed.cancel()

    async def until_given(self, groups: int, *, queued: int = 0) -> None:
        """The engines that decode have so many groups, and so many wait for room."""

        async def given() -> bool:
            await self.http.get("/v1/models")
            return (sum(len(member.groups) for member in self.fleet.members), self.figures.queued) == (groups, queued)

        await eventually(given, f"the engines do not get {groups} groups while {queued} wait")

    async def whole(self) -> None:
        """Waits until all engines are there, with new ones for those that were lost, and nothing is left of the lost
        ones. Connected engines have no folder any more."""
        await self.until(lambda: all(self._is_there(member) for member in self.fleet.members))
        engines = {self.engine(member.id).info.pid for member in self.fleet.members}
        assert set(processes()) - self._processes == engines
        assert len(set(folders()) - self._folders) <= len(engines)

    async def check_nothing_left(self) -> None:
        """Fails if anything is left of any group that was ever asked for. Engines may still be on their way back."""
        self.strikes.disarm()
        await asyncio.gather(*self._blows)
        self._blows.clear()
        for member in self.fleet.members:
            if member.state is WorkerState.DRAINING:
                self.fleet.mark(member.id, WorkerState.READY)
        await eventually(self.holds_nothing, "the engines hold something")
        await eventually(self._nothing_open, "groups are left in the router")
        assert 'groups_without_first_token{model_name="tiny"} 0.0' in (await self.http.get("/metrics")).text
        await eventually(self._no_task_left, "tasks are left")

    async def _nothing_open(self) -> bool:
        """Returns False while the server has yet to hear that a client left; this request lets it hear."""
        await self.http.get("/health")
        try:
            self.fleet.check()
            self._cell.router.check()
        except AssertionError:
            return False
        return True

    async def holds_nothing(self) -> bool:
        """Returns True if no engine holds anything of a group."""
        answering = [member for member in self.fleet.members if member.state in ANSWERING]
        return all([await self._holds_nothing(member.id) for member in answering if not self.engine(member.id).lost])

    def _on_ready(self, serving: Serving[Cell]) -> None:
        self._cell = serving.workforce
        self.service = serving.service
        self._ready.set_result(serving.url)

    def _member(self, id: str) -> Member:
        member = self.fleet.get(id)
        assert member is not None
        return member

    def _is_there(self, member: Member) -> bool:
        return member.state is WorkerState.READY and not self.engine(member.id).lost

    async def _holds_nothing(self, id: str) -> bool:
        stats = await self.stats(id)
        held = stats.blocks_used + stats.leases + stats.pulls_open + stats.blocks_pulling
        return held + stats.groups_running + stats.groups_waiting == 0

    async def _no_task_left(self) -> bool:
        """A lost engine has no tasks left, and an engine that is starting has no more of them than one that runs."""
        await self.http.get("/health")
        return len(asyncio.all_tasks()) <= self._tasks


async def eventually(holds: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """Asks until the answer is yes. Each question waits for its answer, so the time limit can strike."""
    try:
        async with asyncio.timeout(SECONDS):
            while not await holds():
                pass
    except TimeoutError:
        raise AssertionError(otherwise) from None


def processes() -> list[int]:
    return [child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def folders() -> list[Path]:
    """Returns the folders that hold the pipes of this process's engines."""
    return list(Path(tempfile.gettempdir()).glob(f"motet-{os.getpid()}-*"))
