"""A prefill or decode replica: a server of our own, as `motet serve` runs it, that others find through the directory.

1. the server starts: engine, HTTP on the node's address. A side-channel port that is taken is tried again one step on
2. announced as meeting: decode connects to every prefill worker there is, prefill waits until it is met (`meeting`)
3. ready: from then on it is announced every few seconds, and who comes later is met when it is announced
4. `close` announces that it leaves, drains, and withdraws; what it does not end in time goes on elsewhere
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace

import msgspec

from motet.deploy.cell import Cell
from motet.deploy.plan import ServerPlan
from motet.deploy.ray.announcing import Announcing
from motet.deploy.ray.directory import ANNOUNCE_S, Announcement, DirectoryClient, Stage
from motet.deploy.ray.following import RETRY_S, Following
from motet.deploy.ray.meeting import MEET_S, Meeting, until_met
from motet.deploy.ray.ports import is_free, none_free
from motet.deploy.ray.running import RunningServer
from motet.deploy.ray.scaling import load_of
from motet.deploy.server import Outcome, run_server
from motet.deploy.serving import Serving
from motet.deploy.start import StartEngine
from motet.deploy.stop import StopSignals, first_of
from motet.errors import DirectoryError, EngineDiedError, MotetError, PortTakenError
from motet.transfer.ticket import TransferAddress
from motet.types import EngineStats, Role

logger = logging.getLogger(__name__)

REACH_S = 60.0
FAREWELL_S = 1.0
TELL_S = 2.0


@dataclass(frozen=True)
class WorkerPlan:
    """All that makes up one prefill or decode replica."""

    id: str
    """Of this start of the replica; no other has it."""
    server: ServerPlan
    """With the replica's role, and the address of its node for HTTP and the side channel."""
    ports: range
    """Side-channel ports, in the order in which they are tried."""


@dataclass(frozen=True)
class WorkerLimits:
    """How often it is heard of, and how long it waits for others."""

    announce_s: float = ANNOUNCE_S
    retry_s: float = RETRY_S
    """Before it asks again who could not be asked."""
    meet_s: float = MEET_S
    reach_s: float = REACH_S
    """A directory that cannot be asked so long at its start ends it."""
    farewell_s: float = FAREWELL_S
    """The same at its end, which it holds up no longer."""
    tell_s: float = TELL_S
    """Its engine may take so long to say what it has: Serve waits 10 s at most, and asks every 2 s."""


LIMITS = WorkerLimits()

Beside = Callable[[Serving[Cell], Following], contextlib.AbstractAsyncContextManager[asyncio.Task[None]]]
"""What runs beside a worker that serves clients itself, entered before it is ready. The worker is of no use without the
task it gives."""


class RayWorker:
    """One replica, from `start` to `close`."""

    def __init__(
        self,
        plan: WorkerPlan,
        directory: DirectoryClient,
        *,
        start_engine: StartEngine,
        beside: Beside | None = None,
        limits: WorkerLimits = LIMITS,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._start_engine = start_engine
        self._beside = beside
        self._limits = limits
        self._following = Following(directory)
        self._announcing = Announcing(
            directory, self._following, self._announcement, period_s=limits.announce_s, retry_s=limits.retry_s
        )
        self._server = RunningServer[Cell]()
        self._meeting: Meeting | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._withdrawn = False
        self._told = EngineStats()
        """Of its load, the last time."""
        self._load: dict[str, float] = {}
        self._stack = contextlib.AsyncExitStack()

    @property
    def serving(self) -> Serving[Cell]:
        return self._server.serving

    async def start(self) -> None:
        """Returns when it is ready. Raises StartupError or DirectoryError; then nothing is left."""
        try:
            await self._start_server()
            await self._meet_all()
            if self._beside is not None:
                self._tasks.append(await self._stack.enter_async_context(self._beside(self.serving, self._following)))
            await self._announcing.reach(Stage.READY, limit_s=self._limits.reach_s)
        except BaseException:
            await self.close()
            raise

    def check(self) -> None:
        """Raises EngineDiedError if it is of no use any more."""
        self._server.check()
        if any(task.done() for task in self._tasks):
            raise EngineDiedError("it is not in touch with the other replicas any more")

    async def _stats(self) -> EngineStats:
        """Of its engine; zeros while that is being started again."""
        stats = [await worker.engine.stats() for worker in self.serving.workforce.workers if worker.local]
        return stats[0] if stats else EngineStats()

    async def load(self) -> dict[str, float]:
        """For Serve, which scales by it. As it was, if its engine does not tell in time: in a long step it is busy."""
        with contextlib.suppress(MotetError, TimeoutError):
            async with asyncio.timeout(self._limits.tell_s):
                before, self._told = self._told, await self._stats()
            self._load = load_of(self._told, before, self._plan.server.engine.max_num_seqs)
        return self._load

    async def close(self, *, at_once: bool = False) -> None:
        """Drains for as long as its settings allow, unless it is to end `at_once`. Twice changes nothing."""
        if self._server.serves and self._tasks:
            with contextlib.suppress(DirectoryError):
                await self._announcing.reach(Stage.LEAVING, limit_s=self._limits.farewell_s)
        await self._server.stop(at_once=at_once)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        await self._withdraw()

    async def _withdraw(self) -> None:
        """A directory that ends at the same time does not answer, and then nobody needs to know."""
        if self._withdrawn or not self._tasks:
            return
        with contextlib.suppress(DirectoryError, TimeoutError):
            async with asyncio.timeout(self._limits.farewell_s):
                await self._directory.withdraw(self._plan.id)
                self._withdrawn = True

    async def _start_server(self) -> None:
        """On the first of the ports that is free and stays it."""
        host = self._plan.server.engine.side_channel_host
        for port in self._plan.ports:
            if port and not is_free(host, port):
                continue
            try:
                await self._server.start(self._run_at(port))
            except PortTakenError as error:
                logger.info("%s; trying the next one", error.message)
            else:
                return
        raise none_free(self._plan.ports, host, self._plan.server.role)

    def _run_at(self, port: int) -> Callable[[Callable[[Serving[Cell]], None], StopSignals], Awaitable[Outcome]]:
        engine = msgspec.structs.replace(self._plan.server.engine, side_channel_port=port)
        plan = replace(self._plan.server, engine=engine)

        def run(on_ready: Callable[[Serving[Cell]], None], signals: StopSignals) -> Awaitable[Outcome]:
            return run_server(plan, start_engine=self._start_engine, on_ready=on_ready, signals=signals)

        return run

    async def _meet_all(self) -> None:
        if self._plan.server.role is Role.DECODE:
            connect = self.serving.workforce.connect
            self._meeting = Meeting(
                connect, self._engine_id, on_met=self._announcing.has_news, limit_s=self._limits.meet_s
            )
        self._begin(self._following.follow())
        # First: of two that start at once, one then sees the other.
        await self._announcing.reach(Stage.MEETING, limit_s=self._limits.reach_s)
        self._begin(self._stay_announced())
        if self._meeting is not None:
            self._begin(self._meeting.keep(self._following, look_s=self._limits.announce_s))
            await self._meeting.all_met(self._following)
        elif self._plan.server.role is Role.PREFILL:
            await until_met(self._engine_id, self._following, limit_s=self._limits.meet_s)

    async def _stay_announced(self) -> None:
        await first_of(self._announcing.keep(), self._server.ended())
        await self._withdraw()  # at once: nobody answers there any more

    def _announcement(self, stage: Stage) -> Announcement:
        return Announcement(
            id=self._plan.id,
            url=self.serving.url,
            role=self._plan.server.role,
            stage=stage,
            transfer=self._transfer(),
            met=self._meeting.met_of(self._following.workers) if self._meeting is not None else (),
        )

    def _transfer(self) -> TransferAddress | None:
        """Of its engine as it is now: one that was started again has another id."""
        local = [worker.engine.info.transfer for worker in self.serving.workforce.workers if worker.local]
        return local[0] if local else None

    def _engine_id(self) -> str:
        transfer = self._transfer()
        return "" if transfer is None else transfer.engine_id

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.create_task(work))
