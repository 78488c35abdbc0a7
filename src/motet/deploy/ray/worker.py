"""A prefill or decode replica: a server of our own, as `motet serve` runs it, that others find through the directory.

1. the server starts: engine, HTTP on the node's address. If its side-channel port is taken, it tries the next one
2. announced as meeting: decode connects to every prefill worker, prefill waits until it has been met (`meeting`)
3. ready: from then on it is announced every few seconds, and meets newcomers when they are announced
4. `close` announces that it leaves, drains, and withdraws; groups that do not end in time go on elsewhere
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from motet.deploy.cell import Cell, StartEngine
from motet.deploy.ray.directory import ANNOUNCE_S, RETRY_S, Announcement, DirectoryCopy, RayDirectory, WorkerStage
from motet.deploy.ray.meeting import MEET_S, PrefillConnections, prefill_replicas, until_met
from motet.deploy.ray.running import RunningServer
from motet.deploy.ray.scaling import load_of
from motet.deploy.server import Serving, run_server
from motet.deploy.server_plan import SIDE_CHANNEL_PORTS, ServerPlan
from motet.deploy.shutdown import first_of
from motet.errors import DirectoryError, MotetError, PortTakenError
from motet.metrics.stats import EngineStats
from motet.settings.gateway_config import GatewayConfig
from motet.settings.ray_config import RayConfig
from motet.transfer.ticket import TransferAddress
from motet.types import Role

logger = logging.getLogger(__name__)

TRIES = 64
"""Number of ports to try: an ending replica of the same rank, or another program, may still have one."""


@dataclass(frozen=True)
class WorkerPlan:
    """The parts of one prefill or decode replica."""

    server: ServerPlan
    """The plan of its server, with its id, its role, and the address of its node for HTTP and the side channel."""
    ports: range
    """Side-channel ports, in the order in which they are tried."""
    prefill: GatewayConfig | None = None
    """How a decode replica that serves clients itself asks prefill replicas; None: it asks none."""


@dataclass(frozen=True)
class WorkerLimits:
    """Times of a worker's announcements, and how long it waits for others."""

    announce_s: float = ANNOUNCE_S
    retry_s: float = RETRY_S
    """Seconds before it tries again after a failed question."""
    meet_s: float = MEET_S
    reach_s: float = 60.0
    """Seconds for which it tries to reach the directory at its start; then the start fails."""
    farewell_s: float = 1.0
    """The same at its end."""
    tell_s: float = 2.0
    """Seconds for its engine to report its load: Serve waits 10 s at most, and asks every 2 s."""


LIMITS = WorkerLimits()


class RayWorker:
    """One replica, from `start` to `close`."""

    def __init__(
        self, plan: WorkerPlan, directory: RayDirectory, *, start_engine: StartEngine, limits: WorkerLimits = LIMITS
    ) -> None:
        self._plan = plan
        self._role = plan.server.role
        self._directory = directory
        self._start_engine = start_engine
        self._limits = limits
        self._following = DirectoryCopy(directory)
        self._announcing = Announcer(self._following, self._announcement, limits=limits)
        self._server = RunningServer[Cell]()
        self._meeting: PrefillConnections | None = None
        self._announced = False
        """True while the directory may know this worker."""
        self._told = EngineStats()
        """The engine's figures at the last report of its load."""
        self._load: dict[str, float] = {}

    @property
    def serving(self) -> Serving[Cell]:
        return self._server.serving

    async def start(self) -> None:
        """Returns when it is ready. If it raises StartupError or DirectoryError, nothing is left."""
        try:
            await self._start_server()
            await self._meet_all()
            if self._plan.prefill is not None:
                members = prefill_replicas(self.serving, self._following, config=self._plan.prefill)
                self._server.companions.add(await self._server.companions.enter_async_context(members))
            await self._announcing.reach(WorkerStage.READY, limit_s=self._limits.reach_s)
        except BaseException:
            await self.close()
            raise

    def check(self) -> None:
        """Raises EngineDiedError if the replica cannot work any more."""
        self._server.check()

    async def load(self) -> dict[str, float]:
        """Returns the load for Serve's scaling: the last one while the engine is in a long step, or none."""
        with contextlib.suppress(MotetError, TimeoutError):
            async with asyncio.timeout(self._limits.tell_s):
                stats = [await worker.engine.stats() for worker in self.serving.workforce.workers if worker.local]
            before, self._told = self._told, stats[0] if stats else EngineStats()
            self._load = load_of(self._told, before, max_num_seqs=self._plan.server.engine.max_num_seqs)
        return self._load

    async def close(self, *, at_once: bool = False) -> None:
        """Drains for as long as its settings allow, unless it must end `at_once`. May be called twice."""
        if self._server.serves and self._announced:
            with contextlib.suppress(DirectoryError):
                await self._announcing.reach(WorkerStage.LEAVING, limit_s=self._limits.farewell_s)
        await self._server.close(at_once=at_once)
        await self._withdraw()

    async def _withdraw(self) -> None:
        """Withdraws from the directory. If that is ending too, it does not answer, and nobody needs to know."""
        if self._announced:
            with contextlib.suppress(DirectoryError, TimeoutError):
                async with asyncio.timeout(self._limits.farewell_s):
                    await self._directory.withdraw(self._plan.server.worker_id)
                    self._announced = False

    async def _start_server(self) -> None:
        """Starts the server on the first port that is free and stays free."""
        host = self._plan.server.engine.side_channel_host
        for port in self._plan.ports:
            if port and not is_free(host, port):
                continue
            plan = replace(self._plan.server, engine=replace(self._plan.server.engine, side_channel_port=port))
            try:
                await self._server.start(partial(run_server, plan, start_engine=self._start_engine))
            except PortTakenError as error:
                logger.info("%s; trying the next one", error.message)
            else:
                return
        ports = self._plan.ports
        raise PortTakenError(
            f"--{self._role}-port: all ports from {ports.start} to {ports.stop - 1} are taken on {host}; give another "
            "first one"
        )

    async def _meet_all(self) -> None:
        limits = self._limits
        if self._role is Role.DECODE:
            connect = self.serving.workforce.connect
            self._meeting = PrefillConnections(
                connect, self._engine_id, on_met=self._announcing.has_news, limit_s=limits.meet_s
            )
        self._server.companions.begin(self._following.follow())
        self._announced = True
        # First of all, so that of two workers that start together one sees the other.
        await self._announcing.reach(WorkerStage.MEETING, limit_s=limits.reach_s)
        self._server.companions.begin(self._stay_announced())
        if self._meeting is not None:
            self._server.companions.begin(self._meeting.keep(self._following, look_s=limits.announce_s))
            await self._meeting.all_met(self._following)
        elif self._role is Role.PREFILL:
            await until_met(self._engine_id, self._following, limit_s=limits.meet_s)

    async def _stay_announced(self) -> None:
        await first_of(self._announcing.keep(), self._server.ended())
        await self._withdraw()  # at once, since the server has stopped answering

    def _announcement(self, stage: WorkerStage) -> Announcement:
        return Announcement(
            id=self._plan.server.worker_id,
            url=self.serving.url,
            role=self._role,
            stage=stage,
            transfer=self._transfer(),
            met=self._meeting.met_of(self._following.workers) if self._meeting is not None else (),
        )

    def _transfer(self) -> TransferAddress | None:
        """Returns the present address of its engine: an engine that was started again has another id."""
        local = [worker.engine.info.transfer for worker in self.serving.workforce.workers if worker.local]
        return local[0] if local else None

    def _engine_id(self) -> str:
        transfer = self._transfer()
        return "" if transfer is None else transfer.engine_id


class Announcer:
    """Sends a worker's announcements: at its start, with news, every few seconds; one at a time, to keep the order."""

    def __init__(
        self, following: DirectoryCopy, say: Callable[[WorkerStage], Announcement], *, limits: WorkerLimits = LIMITS
    ) -> None:
        """`say`: makes the present announcement for a stage."""
        self._following = following
        self._say = say
        self._limits = limits
        self._stage = WorkerStage.MEETING
        self._news = asyncio.Event()
        self._telling = asyncio.Lock()

    async def reach(self, stage: WorkerStage, *, limit_s: float) -> None:
        """Returns once the directory knows the stage. Raises DirectoryError if it cannot be reached in time; `keep`
        goes on trying."""
        self._stage = stage
        failure: DirectoryError | None = None
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._announce()
                    except DirectoryError as error:
                        failure = error
                    await asyncio.sleep(self._limits.retry_s)
        except TimeoutError as error:
            said = failure.message if failure else "the directory of workers does not answer"
            raise DirectoryError(f"{said}; it was tried for {limit_s:g} s") from error

    def has_news(self) -> None:
        """Called when the worker's announcement has changed."""
        self._news.set()

    async def keep(self) -> None:
        """Announces the worker until it is cancelled."""
        while True:
            await first_of(self._news.wait(), timeout_s=self._limits.announce_s)
            self._news.clear()  # before announcing: later news is announced once more
            with contextlib.suppress(DirectoryError):
                await self._announce()

    async def _announce(self) -> None:
        async with self._telling:
            await self._following.announce(self._say(self._stage))


def side_channel_ports(role: Role, rank: int, *, ray: RayConfig) -> range:
    """Returns the port of this role and rank, and those after it; only 0 if any free port is allowed."""
    first = {Role.PREFILL: ray.prefill_port, Role.DECODE: ray.decode_port}.get(role, SIDE_CHANNEL_PORTS[role])
    if first == 0:
        return range(1)
    return range(first + rank, min(first + rank + TRIES, 2**16))


def is_free(host: str, port: int) -> bool:
    """Returns False if somebody listens there now. Other problems are reported by the engine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True
