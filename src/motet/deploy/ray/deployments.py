"""The classes of Serve's replicas. Each is a thin wrapper of an object that does the work."""

import asyncio
import logging
from collections.abc import Mapping

import msgspec
import ray
from ray import serve

from motet.api.http.request_ids import ProxiedApp
from motet.deploy.cell import StartEngine
from motet.deploy.ray.balance import LoadReport
from motet.deploy.ray.clients import ClientStreams
from motet.deploy.ray.directory import Handle, RayDirectory
from motet.deploy.ray.replica_plans import ReplicaPlace, gateway_replica_plan, worker_plan, worker_role
from motet.deploy.ray.running_server import running_gateway
from motet.deploy.ray.worker import RayWorker
from motet.deploy.server import favour_streams
from motet.engines.native.client import NativeEngine
from motet.log import setup_logging
from motet.settings.declaration import ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import environment
from motet.types import Role

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0
FIXED_ADAPTERS = (
    "Adapters cannot be loaded or unloaded at run time with direct ingress, because only one replica would do it: use "
    "--adapter, or --ingress gateway."
)
STOPPING = "STOPPING"

Arguments = Mapping[str, object]
"""Settings by name, as the application received them."""


class WorkerReplica:
    """A replica that computes prompts and provides their KV, or generates choices for gateways."""

    start_engine: StartEngine = staticmethod(NativeEngine.start)

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, arguments: Arguments, directory: Handle, *, role: Role | None = None
    ) -> None:
        """`role`: None for replicas that decode."""
        self._worker = await started_worker(arguments, directory, role=role, start_engine=self.start_engine)

    async def check_health(self) -> None:
        self._worker.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._worker.load()

    async def wake(self) -> None:
        """Returns at once, which shows the caller that there is a replica."""

    async def __del__(self) -> None:
        await self._worker.close()


@serve.ingress(None)
class DirectReplica:
    """A replica that generates choices and serves clients directly."""

    start_engine: StartEngine = staticmethod(NativeEngine.start)

    async def __init__(  # type: ignore[misc]
        self, arguments: Arguments, directory: Handle, *, prefill: Handle | None = None
    ) -> None:
        self._worker = await started_worker(arguments, directory, role=None, start_engine=self.start_engine)
        self._worker.serving.workforce.control.adapters.fixed = FIXED_ADAPTERS
        self._streams = ClientStreams(self._worker, prefill, any_ending=any_ending)
        self._reports = 0

    async def __serve_build_asgi_app__(self) -> ProxiedApp:
        return ProxiedApp(self._worker.serving.app)

    async def check_health(self) -> None:
        self._streams.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._worker.load()

    async def __del__(self) -> None:
        await self._streams.close()

    def record_routing_stats(self) -> dict[str, int]:
        """Reports the load to Serve, which passes it to the routers."""
        self._reports += 1
        return msgspec.structs.asdict(LoadReport(self._reports, self._worker.serving.service.key_limits.num_choices))


@serve.ingress(None)
class GatewayReplica:
    """A replica that serves clients, with workers in other replicas."""

    async def __init__(  # type: ignore[misc]
        self, arguments: Arguments, directory: Handle, *, decode: Handle, prefill: Handle | None = None
    ) -> None:
        plan = gateway_replica_plan(settings_here(arguments), place_here(), environ=environment())
        self._server = await running_gateway(plan, RayDirectory(directory))
        self._streams = ClientStreams(self._server, prefill, any_ending=any_ending)
        favour_streams()

    async def __serve_build_asgi_app__(self) -> ProxiedApp:
        return ProxiedApp(self._server.serving.app)

    async def check_health(self) -> None:
        self._streams.check()

    async def __del__(self) -> None:
        await self._streams.close()


async def started_worker(
    arguments: Arguments, directory: Handle, *, role: Role | None, start_engine: StartEngine
) -> RayWorker:
    """Starts the worker of this replica. `role`: None for the role of decode replicas."""
    settings = settings_here(arguments)
    plan = worker_plan(settings, role or worker_role(settings), place=place_here(), environ=environment())
    worker = RayWorker(plan, RayDirectory(directory), start_engine=start_engine)
    await worker.start()
    favour_streams()
    return worker


def settings_here(arguments: Arguments) -> Settings:
    """Resolves the settings with this node's environment, which can have the address of its fast network."""
    settings = resolve_settings(arguments, environ=environment(), command=ServerCommand.RAY)
    server = settings.server()
    setup_logging(format=server.log_format, level=server.log_level)
    return settings


def place_here() -> ReplicaPlace:
    context = serve.get_replica_context()
    return ReplicaPlace(
        id=f"{context.deployment}-{context.replica_id.unique_id}",
        address=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
        rank=context.rank.rank if context.rank is not None else 0,
    )


async def any_ending() -> bool:
    """Returns True if Serve is ending a replica of this deployment; False if Serve does not answer."""
    context = serve.get_replica_context()
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            status = await asyncio.to_thread(serve.status)
    except Exception as error:  # Ray can raise any error if the controller has ended
        logger.info("Serve does not answer: %s", error)
        return False
    application = status.applications.get(context.app_name)
    deployment = None if application is None else application.deployments.get(context.deployment)
    return deployment is None or any(state == STOPPING for state, number in deployment.replica_states.items() if number)
