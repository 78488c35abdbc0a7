"""Runs prefill and decode replicas in the test's own event loop, with scripted engines and real sockets."""

import asyncio
import os
from collections.abc import Set
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from motet.deploy.ray.worker import RayWorker, WorkerLimits, WorkerPlan
from motet.deploy.server_plan import ServerPlan
from motet.engine import Engine
from motet.settings.engine_config import EngineConfig
from motet.settings.gateway_config import GatewayConfig
from motet.settings.server_config import CellConfig, RoutingConfig, ServerConfig
from motet.types import Role
from tests.deploy.dying import DyingEngine, Starter
from tests.deploy.ray.directories import FakeDirectory
from tests.patience import PATIENCE_S

QUICK = WorkerLimits(announce_s=0.05, retry_s=0.01, connect_s=PATIENCE_S, reach_s=PATIENCE_S, leave_s=0.05)


class RunningWorker:
    """A replica that runs while the `async with` lasts."""

    def __init__(
        self,
        folder: Path,
        directory: FakeDirectory,
        role: Role,
        *,
        starter: Starter,
        id: str = "",
        ports: range = range(1),
        restarts: int = 0,
        limits: WorkerLimits = QUICK,
        prefill: GatewayConfig | None = None,
        **server: object,
    ) -> None:
        self.id = id or role.value
        self.directory = directory
        settings = {"served_model_name": "tiny", "port": 0} | server
        plan = ServerPlan(
            EngineConfig(model_path=str(folder), model_name="tiny", role=role),
            msgspec.convert(settings, ServerConfig),
            tokenizer_path=folder,
            chat_template=None,
            cell=CellConfig(bypass_tokens=0),
            routing=RoutingConfig(engine_restarts=restarts, migration_wait_s=0.0),
            worker_id=self.id,
            death_linger_s=0.0,
        )
        self.worker = RayWorker(WorkerPlan(plan, ports, prefill), directory, start_engine=starter, limits=limits)

    async def __aenter__(self) -> "RunningWorker":
        await self.worker.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.worker.close()

    @property
    def url(self) -> str:
        return self.worker.serving.url

    @property
    def engine(self) -> DyingEngine:
        """The current engine."""
        (engine,) = [worker.engine for worker in self.worker.serving.workforce.workers if worker.local]
        return dying(engine)

    @property
    def engine_id(self) -> str:
        transfer = self.engine.info.transfer
        assert transfer is not None  # the engine has a role
        return transfer.engine_id

    @property
    def announced_connections(self) -> Set[str]:
        """Returns the ids of all engines that it has announced as connected."""
        announced = [announcement for announcement in self.directory.announced if announcement.id == self.id]
        return {engine_id for announcement in announced for engine_id in announcement.connected}


def dying(engine: Engine) -> DyingEngine:
    assert isinstance(engine, DyingEngine)
    return engine


class LeakCheck:
    """Tasks and listening sockets of the process at the start of a test. It must have no others at the end."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._listening = listening()

    def check(self) -> None:
        """Raises if the process has more now."""
        assert asyncio.all_tasks() == self._tasks
        assert listening() <= self._listening


def listening() -> Set[object]:
    return {
        connection.laddr
        for connection in psutil.Process(os.getpid()).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
