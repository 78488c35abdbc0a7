"""A prefill or decode replica: a server as `motet serve` runs it, which other replicas find through the directory.

1. the server starts: an engine, and HTTP on the node's address. If the side-channel port is taken, the next one is used
2. the worker is announced as connecting: decode workers connect to every prefill worker, and prefill workers wait for
   these connections (`prefill_connections`)
3. the worker is announced as ready, every few seconds; decode workers connect to new prefill workers
4. `close` announces that the worker leaves, drains it, and withdraws it; groups that do not end in time continue on
   another worker
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
from motet.deploy.listen import PORT_OPTION
from motet.deploy.ray.directory import ANNOUNCE_S, RETRY_S, Announcement, DirectoryCopy, RayDirectory, WorkerStage
from motet.deploy.ray.prefill_connections import CONNECT_S, PrefillConnections, prefill_replicas, until_connected
from motet.deploy.ray.running_server import RunningServer
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

MAX_PORTS = 64
"""Maximum number of ports to try: an ending replica of the same rank, or another program, can use some of them."""


@dataclass(frozen=True)
class WorkerPlan:
    """The plan of one prefill or decode replica."""

    server: ServerPlan
    """Plan of the server, with the worker's id and role, and the node's address for HTTP and the side channel."""
    ports: range
    """Side-channel ports, in the order in which they are tried."""
    prefill: GatewayConfig | None = None
    """Settings for requests to prefill replicas, if the replica decodes and serves clients directly; else None."""


@dataclass(frozen=True)
class WorkerLimits:
    """Times of a worker's announcements, and time limits for waiting."""

    announce_s: float = ANNOUNCE_S
    retry_s: float = RETRY_S
    """Time between a failed call to the directory and the next one."""
    connect_s: float = CONNECT_S
    reach_s: float = 60.0
    """Maximum time to reach the directory at the start; then the start fails."""
    leave_s: float = 1.0
    """Maximum time to reach the directory at the end."""
    stats_s: float = 2.0
    """Maximum time for the engine to report its load. Serve requests a report every 2 s, and waits 10 s for it."""


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
        self._copy = DirectoryCopy(directory)
        self._announcer = Announcer(self._copy, self._announcement, limits=limits)
        self._server = RunningServer[Cell]()
        self._connections: PrefillConnections | None = None
        """Connections to prefill workers; None for other roles, and before the server has started."""
        self._announced = False
        """True while the directory can list this worker."""
        self._stats = EngineStats()
        """Figures of the engine at the last load report."""
        self._load: dict[str, float] = {}

    @property
    def serving(self) -> Serving[Cell]:
        return self._server.serving

    async def start(self) -> None:
        """Returns when the worker is ready. Raises StartupError or DirectoryError, with nothing left running."""
        try:
            await self._start_server()
            await self._connect()
            if self._plan.prefill is not None:
                members = prefill_replicas(self.serving, self._copy, config=self._plan.prefill)
                self._server.tasks.add(await self._server.tasks.enter_async_context(members))
            await self._announcer.reach(WorkerStage.READY, limit_s=self._limits.reach_s)
        except BaseException:
            await self.close()
            raise

    def check(self) -> None:
        """Raises EngineDiedError if the replica cannot work any more."""
        self._server.check()

    async def load(self) -> dict[str, float]:
        """Returns the load for Serve's scaling. If the engine does not report it in time, as in a long step,
        returns the last known load, which is empty at first."""
        with contextlib.suppress(MotetError, TimeoutError):
            async with asyncio.timeout(self._limits.stats_s):
                stats = [await worker.engine.stats() for worker in self.serving.workforce.workers if worker.local]
            before, self._stats = self._stats, stats[0] if stats else EngineStats()
            self._load = load_of(self._stats, before, max_num_seqs=self._plan.server.engine.max_num_seqs)
        return self._load

    async def close(self, *, at_once: bool = False) -> None:
        """Drains for `drain_timeout_s` of the settings, or ends `at_once`. Can be called twice."""
        if self._server.serves and self._announced:
            with contextlib.suppress(DirectoryError):
                await self._announcer.reach(WorkerStage.LEAVING, limit_s=self._limits.leave_s)
        await self._server.close(at_once=at_once)
        await self._withdraw()

    async def _withdraw(self) -> None:
        """Withdraws from the directory, which can be ending too: it does not have to answer."""
        if self._announced:
            with contextlib.suppress(DirectoryError, TimeoutError):
                async with asyncio.timeout(self._limits.leave_s):
                    await self._directory.withdraw(self._plan.server.worker_id)
                    self._announced = False

    async def _start_server(self) -> None:
        """Starts the server with the first port that is free, and still free when the engine binds it."""
        host, ports = self._plan.server.engine.side_channel_host, self._plan.ports
        for port in ports:
            if port and not is_free(host, port):
                continue
            plan = replace(self._plan.server, engine=replace(self._plan.server.engine, side_channel_port=port))
            try:
                return await self._server.start(partial(run_server, plan, start_engine=self._start_engine))
            except PortTakenError as error:
                logger.info("%s; trying the next one", error.message)
        raise PortTakenError(
            f"--{self._role}-port: all ports from {ports.start} to {ports.stop - 1} are taken on {host}; set another "
            "first port"
        )

    async def _connect(self) -> None:
        """Announces the worker, and connects it to the workers with which it exchanges KV."""
        limits, tasks = self._limits, self._server.tasks
        if self._role is Role.DECODE:
            self._connections = PrefillConnections(
                self.serving.workforce.connect,
                self._engine_id,
                on_connected=self._announcer.record_change,
                limit_s=limits.connect_s,
            )
        tasks.start(self._copy.follow())
        self._announced = True
        # First, since of two workers that start at the same time, the one that is announced later finds the other.
        await self._announcer.reach(WorkerStage.CONNECTING, limit_s=limits.reach_s)
        tasks.start(self._stay_announced())
        if self._connections is not None:
            tasks.start(self._connections.keep(self._copy, poll_s=limits.announce_s))
            await self._connections.all_connected(self._copy)
        elif self._role is Role.PREFILL:
            await until_connected(self._engine_id, self._copy, limit_s=limits.connect_s)

    async def _stay_announced(self) -> None:
        await first_of(self._announcer.keep(), self._server.ended())
        await self._withdraw()  # at once, since the server does not answer any more

    def _announcement(self, stage: WorkerStage) -> Announcement:
        return Announcement(
            id=self._plan.server.worker_id,
            url=self.serving.url,
            role=self._role,
            stage=stage,
            transfer=self._transfer(),
            connected=() if self._connections is None else self._connections.connected_of(self._copy.workers),
        )

    def _transfer(self) -> TransferAddress | None:
        """Returns the engine's current address. An engine that was restarted has a new id."""
        local = [worker.engine.info.transfer for worker in self.serving.workforce.workers if worker.local]
        return local[0] if local else None

    def _engine_id(self) -> str:
        return "" if (transfer := self._transfer()) is None else transfer.engine_id


class Announcer:
    """Sends a worker's announcements, one at a time: at its start, after changes, and every few seconds."""

    def __init__(
        self, copy: DirectoryCopy, announcement: Callable[[WorkerStage], Announcement], *, limits: WorkerLimits = LIMITS
    ) -> None:
        """`announcement`: makes the current announcement for a stage."""
        self._copy = copy
        self._announcement = announcement
        self._limits = limits
        self._stage = WorkerStage.CONNECTING
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()

    async def reach(self, stage: WorkerStage, *, limit_s: float) -> None:
        """Announces the stage. Raises DirectoryError if that is not possible in time; `keep` continues to try."""
        self._stage = stage
        failure = "the directory of workers does not answer"
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._announce()
                    except DirectoryError as error:
                        failure = error.message
                    await asyncio.sleep(self._limits.retry_s)
        except TimeoutError as error:
            raise DirectoryError(f"{failure}; tried for {limit_s:g} s") from error

    def record_change(self) -> None:
        """Lets `keep` send the worker's announcement now, since it has changed."""
        self._changed.set()

    async def keep(self) -> None:
        """Announces the worker until it is cancelled."""
        while True:
            await first_of(self._changed.wait(), timeout_s=self._limits.announce_s)
            self._changed.clear()  # before announcing: a change during the announcement is announced next
            with contextlib.suppress(DirectoryError):
                await self._announce()

    async def _announce(self) -> None:
        async with self._sending:
            await self._copy.announce(self._announcement(self._stage))


def side_channel_ports(role: Role, rank: int, *, ray: RayConfig) -> range:
    """Returns the port of this role and rank, and the ports after it; only 0 for any free port."""
    first = {Role.PREFILL: ray.prefill_port, Role.DECODE: ray.decode_port}.get(role, SIDE_CHANNEL_PORTS[role])
    if first == 0:
        return range(1)
    return range(first + rank, min(first + rank + MAX_PORTS, 2**16))


def is_free(host: str, port: int) -> bool:
    """Returns False if a program listens there now. Other problems are reported by the engine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, PORT_OPTION, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True
