"""A server with real engine processes in the test's event loop: tests send it requests, inspect it and inject faults.

A test fails if it leaves groups in the router, blocks, leases, admission slots, processes, folders or tasks.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
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
from motet.settings.server_config import CellConfig, RoutingConfig, ServerConfig
from motet.text.rendering.render_process import started
from tests.fault.answers import Answer, Body, Reader, fetch_answer, lines_of, read
from tests.fault.faults import FaultAction, FaultPlan, FaultyEngine, Point, start_faulty
from tests.patience import PATIENCE_S
from tests.tiny_engine import engine_config

LONG_LIMITS = {"lease_s": 6 * PATIENCE_S, "heartbeat_timeout_s": 60.0}
"""With these settings a forgotten lease does not expire during a test, and no engine counts as hung because the machine
is busy."""
PREFILL_AND_DECODE = CellConfig(prefill=1, decode=2, bypass_tokens=0)
TWO_DECODE_ENGINES = CellConfig(decode=2)
MANY_RESTARTS = RoutingConfig(engine_restarts=50, migration_wait_s=PATIENCE_S)


class RunningCell:
    """A server that runs while the `async with` lasts. After a fault it must be complete again within PATIENCE_S."""

    def __init__(
        self,
        folder: Path,
        *,
        cell: CellConfig = PREFILL_AND_DECODE,
        routing: RoutingConfig = MANY_RESTARTS,
        server: dict[str, object] | None = None,
        spawn: Spawn,
        **engine: object,
    ) -> None:
        """`spawn`: starts engine processes. `engine`: settings in addition to the settings for tiny models."""
        self.faults = FaultPlan()
        self._start = partial(start_faulty, faults=self.faults, spawn=spawn)
        self.signals = StopSignals()
        self._plan = ServerPlan(
            engine_config(folder, **{**LONG_LIMITS, **engine}),
            msgspec.convert({"served_model_name": "tiny", "port": 0, **(server or {})}, ServerConfig),
            tokenizer_path=folder,
            chat_template=None,
            cell=cell,
            routing=routing,
            death_linger_s=PATIENCE_S,
            longest_backoff_s=0.05,
        )
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._processes = set(processes())
        self._folders = set(folders())
        self._actions: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "RunningCell":
        self._running = asyncio.ensure_future(
            run_server(self._plan, start_engine=self._start, on_ready=self._on_ready, signals=self.signals)
        )
        await asyncio.wait((self._running, self._ready), return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            self._running.result()
        self.http = httpx.AsyncClient(base_url=self._ready.result(), timeout=PATIENCE_S)
        self._tasks = len(asyncio.all_tasks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signals.receive()
        if error is not None:
            self.signals.receive()
        try:
            await self.outcome()
            await eventually(self._has_no_processes, "processes are left")
            assert set(folders()) <= self._folders
        finally:
            await self.http.aclose()

    async def _has_no_processes(self) -> bool:
        """Returns True if all processes of the cell have ended. A process that rendered chat templates is killed with
        the cell, and nothing waits for its end."""
        await asyncio.sleep(0.001)
        return set(processes()) <= self._processes

    async def outcome(self) -> Outcome:
        """Waits until the server has ended, and returns its outcome. It first drains: every admitted group ends."""
        return await asyncio.wait_for(asyncio.shield(self._running), PATIENCE_S)

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
        """Number of moves of groups to another worker."""
        return sum(self.figures.migrations.values())

    def engine(self, id: str) -> FaultyEngine:
        worker = self._member(id).worker
        assert worker is not None
        assert isinstance(worker.engine, FaultyEngine)
        return worker.engine

    async def stats(self, id: str) -> EngineStats:
        return await self.engine(id).stats(check=True)

    @property
    def decoding(self) -> list[FaultyEngine]:
        """Returns the available engines that decode."""
        return [self.engine(member.id) for member in self.fleet.catalog.ready()]

    def id_of(self, engine: FaultyEngine) -> str:
        return next(member.id for member in self.fleet.members if member.worker and member.worker.engine is engine)

    def leave(self, engine: FaultyEngine) -> None:
        """Injects a fault: the worker leaves, and its groups must move."""
        id = self.id_of(engine)
        self.fleet.mark(id, WorkerState.DRAINING)
        engine.leaving = asyncio.create_task(self.fleet.evict(id, WorkerLeavingError(f"{id} is leaving")))
        self._actions.append(engine.leaving)

    def on_all(self, action: FaultAction) -> FaultAction:
        """Returns an action that injects a fault into every engine that decodes, whichever engine reached the point."""

        def fault(_: FaultyEngine) -> None:
            for engine in self.decoding:
                action(engine)

        return fault

    @contextmanager
    def all_on(self, id: str) -> Iterator[None]:
        """Sends every group that arrives during the context to that worker."""
        others = [member.id for member in self.fleet.members if member.id.startswith("decode") and member.id != id]
        for other in others:
            self.fleet.mark(other, WorkerState.DRAINING)
        yield
        for other in others:
            self.fleet.mark(other, WorkerState.READY)

    async def fetch_answer_on(self, id: str, route: str, body: Body, *, point: Point, action: FaultAction) -> Answer:
        """Requests a group whose worker `id` has a fault. The group can continue on any other worker."""
        with self.all_on(id):
            fault = self.faults.arm(point, action)
            answering = asyncio.create_task(fetch_answer(self.http, route, body))
            await first_of(fault.happened.wait(), asyncio.wait([answering]))
        return await answering

    @asynccontextmanager
    async def started_stream(self, route: str, body: Body, *, chunks: int = 20) -> AsyncIterator["StartedStream"]:
        """Requests a stream, and reads its first chunks."""
        async with self.http.stream("POST", route, json=body) as response:
            stream = StartedStream(lines_of(response))
            await read(stream.lines, stream.reader, until=lambda reader: reader.chunks == chunks)
            yield stream

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for the condition, which is checked at each change of the fleet."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                changed = self.fleet.changes.wait()
                try:
                    await changed
                finally:
                    changed.cancel()

    async def until_submitted(self, groups: int, *, queued: int = 0) -> None:
        """Waits until the engines that decode have this number of groups, and `queued` groups wait for capacity."""

        async def submitted() -> bool:
            await self.http.get("/v1/models")
            return (sum(len(member.groups) for member in self.fleet.members), self.figures.queued) == (groups, queued)

        await eventually(submitted, f"the engines do not get {groups} groups while {queued} wait")

    async def restored(self) -> None:
        """Waits until all engines are available again, and checks that nothing is left of the lost engines. An engine
        has no folder once it is connected."""
        await self.until(lambda: all(self._is_available(member) for member in self.fleet.members))
        engines = {self.engine(member.id).info.pid for member in self.fleet.members}
        assert set(processes()) - self._processes == engines
        assert len(set(folders()) - self._folders) <= len(engines)

    async def check_nothing_left(self) -> None:
        """Fails if anything is left of a group. Engines can still be restarting."""
        self.faults.disarm()
        await asyncio.gather(*self._actions)
        self._actions.clear()
        for member in self.fleet.members:
            if member.state is WorkerState.DRAINING:
                self.fleet.mark(member.id, WorkerState.READY)
        await eventually(self.holds_nothing, "the engines hold something")
        await eventually(self._nothing_open, "groups are left in the router")
        assert 'groups_without_first_token{model_name="tiny"} 0.0' in (await self.http.get("/metrics")).text
        await eventually(self._no_task_left, "tasks are left")

    async def _nothing_open(self) -> bool:
        """Returns True if the router has no group. A request is sent first, during which the server notices that
        clients have disconnected."""
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

    def _is_available(self, member: Member) -> bool:
        return member.state is WorkerState.READY and not self.engine(member.id).lost

    async def _holds_nothing(self, id: str) -> bool:
        stats = await self.stats(id)
        held = stats.blocks_used + stats.leases + stats.pulls_open + stats.blocks_pulling
        return held + stats.groups_running + stats.groups_waiting == 0

    async def _no_task_left(self) -> bool:
        """Returns True if there are no more tasks than at the start. A lost engine has no tasks, and a starting engine
        has no more than a running one."""
        await self.http.get("/health")
        return len(asyncio.all_tasks()) <= self._tasks


@dataclass(frozen=True)
class StartedStream:
    """A streamed answer, partly read by the client."""

    lines: AsyncIterator[str]
    reader: Reader = field(default_factory=Reader)

    @property
    def has_ended(self) -> bool:
        """True if the client has read the end of every choice."""
        return all(choice.finish_reason for choice in self.reader.answer.choices.values())

    async def rest(self) -> Answer:
        """Reads to the end, and returns the complete answer."""
        return (await read(self.lines, self.reader)).complete()


async def eventually(holds: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """Calls `holds` until it returns True. Each call awaits something, so the time limit can end it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                pass
    except TimeoutError:
        raise AssertionError(otherwise) from None


def processes() -> list[int]:
    """Returns the child processes of this process, without the ones in which chat templates are rendered."""
    rendering = {process.pid for process in started}
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child.pid for child in children if child.pid not in rendering]


def folders() -> list[Path]:
    """Returns the folders that hold the pipes of this process's engines."""
    return list(Path(tempfile.gettempdir()).glob(f"motet-{os.getpid()}-*"))
