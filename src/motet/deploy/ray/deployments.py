"""The classes that Serve makes replicas of. Each is a frame around one of our objects; what they do is in those."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

import ray
from fastapi import FastAPI
from ray import serve

from motet.config import EngineConfig, environment
from motet.deploy.compose import Router
from motet.deploy.heap import freeze_heap
from motet.deploy.ray.balance import Record
from motet.deploy.ray.gateway_replica import RayGateway
from motet.deploy.ray.handles import Handle, RayDirectory
from motet.deploy.ray.interest import Farewell, Interest
from motet.deploy.ray.prefill_members import prefill_members
from motet.deploy.ray.replica_plans import Place, engine_key, gateway_plan, serves_clients, worker_plan, worker_role
from motet.deploy.ray.waking import Waker, missed_by, wake
from motet.deploy.ray.worker import RayWorker
from motet.deploy.start import LocalEngine
from motet.engines.native.client import NativeEngine
from motet.log import setup_logging_as
from motet.settings import Settings, resolve_settings
from motet.settings.record import RAY
from motet.types import Role

logger = logging.getLogger(__name__)

STATUS_S = 5.0
STOPPING = "STOPPING"

Arguments = Mapping[str, object]
"""Settings by name, as they came into the application."""


def settings_here(arguments: Arguments) -> Settings:
    """With what the environment of this node adds, such as the address of its fast network."""
    settings = resolve_settings(arguments, environ=environment(), names=RAY)
    server = settings.server(served_model_name="")
    setup_logging_as(server.log_format, server.log_level)
    return settings


def place_here() -> Place:
    context = serve.get_replica_context()
    rank = context.rank.rank if context.rank is not None else 0
    return Place(
        id=f"{context.deployment}-{context.replica_id.unique_id}",
        address=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
        rank=rank,
    )


class WorkerReplica:
    """What prefill and decode replicas have in common."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, arguments: Arguments, directory: Handle, role: Role | None = None
    ) -> None:
        settings = settings_here(arguments)
        role = role or worker_role(settings)
        plan = worker_plan(settings, role, place_here(), environ=environment())
        beside = None
        if serves_clients(settings, role) and role is Role.DECODE:
            beside = partial(
                prefill_members,
                api_key=engine_key(settings),
                worker_timeout_s=settings.gateway.worker_timeout_s,
                drain_s=plan.server.server.drain_timeout_s,
            )
        self.worker = RayWorker(plan, RayDirectory(directory), start_engine=self._start_engine, beside=beside)
        await self.worker.start()
        freeze_heap()

    async def _start_engine(self, config: EngineConfig) -> LocalEngine:
        return await NativeEngine.start(config)

    async def check_health(self) -> None:
        self.worker.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self.worker.load()

    async def __del__(self) -> None:
        await self.worker.close()


class PrefillReplica(WorkerReplica):
    """Computes prompts, and hands their KV over."""

    async def __init__(self, arguments: Arguments, directory: Handle) -> None:  # type: ignore[misc]
        await WorkerReplica.__init__(self, arguments, directory, Role.PREFILL)

    async def wake(self) -> None:
        """Answers: that it is there is all that is wanted."""


class DecodeReplica(WorkerReplica):
    """Writes choices for gateways."""

    async def __init__(self, arguments: Arguments, directory: Handle) -> None:  # type: ignore[misc]
        await WorkerReplica.__init__(self, arguments, directory)


@serve.ingress(None)
class DirectReplica(WorkerReplica):
    """Writes choices, and serves clients itself."""

    async def __init__(  # type: ignore[misc]
        self, arguments: Arguments, directory: Handle, prefill: Handle | None = None
    ) -> None:
        self._waker: Waker | None = None
        self._farewell: Farewell | None = None
        await WorkerReplica.__init__(self, arguments, directory)
        self._records = 0
        self._waker = waker_of(prefill, self.worker.serving.workforce.router)
        limit_s = self.worker.serving.service.config.drain_timeout_s
        self._interest = Interest(one_is_ended)
        self._farewell = Farewell(self._interest, limit_s, partial(self.worker.close, at_once=True))

    async def check_health(self) -> None:
        self._interest.asked()
        self.worker.check()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return self.worker.serving.app

    def record_routing_stats(self) -> dict[str, int]:
        """For Serve, which hands it to the routers."""
        self._records += 1
        return Record(self._records, self.worker.serving.service.key_limits.num_choices).stats()

    async def __del__(self) -> None:
        if self._waker is not None:
            await self._waker.close()
        if self._farewell is not None:
            await self._farewell.close()
        await self.worker.close()


@serve.ingress(None)
class GatewayReplica:
    """Serves clients, over workers elsewhere."""

    async def __init__(  # type: ignore[misc]
        self, arguments: Arguments, directory: Handle, decode: Handle, prefill: Handle | None = None
    ) -> None:
        self._waker: Waker | None = None
        self._farewell: Farewell | None = None
        settings = settings_here(arguments)
        self.gateway = RayGateway(gateway_plan(settings, place_here(), environ=environment()), RayDirectory(directory))
        await self.gateway.start()
        self._waker = waker_of(prefill, self.gateway.serving.workforce.router)
        limit_s = self.gateway.serving.service.config.drain_timeout_s
        self._interest = Interest(one_is_ended)
        self._farewell = Farewell(self._interest, limit_s, partial(self.gateway.close, at_once=True))
        freeze_heap()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return self.gateway.serving.app

    async def check_health(self) -> None:
        self._interest.asked()
        self.gateway.check()

    async def __del__(self) -> None:
        if self._waker is not None:
            await self._waker.close()
        if self._farewell is not None:
            await self._farewell.close()
        await self.gateway.close()


def waker_of(prefill: Handle | None, router: Router) -> Waker | None:
    """None: there is no such deployment."""
    return None if prefill is None else Waker(missed_by(router), partial(wake, prefill))


async def one_is_ended() -> bool:
    """Whether Serve says that a replica of this deployment is being ended; not if it does not answer."""
    context = serve.get_replica_context()
    try:
        async with asyncio.timeout(STATUS_S):
            status = await asyncio.to_thread(serve.status)
    except Exception as error:  # whatever Ray makes of a controller that is gone
        logger.info("Serve does not answer: %s", error)
        return False
    application = status.applications.get(context.app_name)
    deployment = None if application is None else application.deployments.get(context.deployment)
    return deployment is None or any(state == STOPPING for state, number in deployment.replica_states.items() if number)
