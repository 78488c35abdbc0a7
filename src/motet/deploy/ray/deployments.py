"""The classes of which Serve makes replicas. Each is a thin frame around one of our objects, which does the work."""

import asyncio
import logging
from collections.abc import Mapping

import msgspec
import ray
from fastapi import FastAPI, Request, Response
from ray import serve

from motet.api.http.caller import session_id_of
from motet.deploy.cell import LocalEngine
from motet.deploy.gateway import Gateway
from motet.deploy.ray.balance import Record
from motet.deploy.ray.clients import ClientStreams
from motet.deploy.ray.directory import Handle, RayDirectory
from motet.deploy.ray.prefix_choice import PrefixRouter
from motet.deploy.ray.replica_plans import ReplicaPlace, gateway_replica_plan, worker_plan, worker_role
from motet.deploy.ray.running import RunningServer, running_gateway
from motet.deploy.ray.worker import RayWorker
from motet.deploy.server import favour_streams
from motet.engines.native.client import NativeEngine
from motet.log import setup_logging
from motet.settings.declaration import ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import EngineConfig, environment
from motet.types import Role

logger = logging.getLogger(__name__)

STATUS_S = 5.0
STOPPING = "STOPPING"
ROUTE = "/internal/route"

Arguments = Mapping[str, object]
"""Settings by name, as the application got them."""


class Replica:
    """The common part of all replicas with a server of ours."""

    server: RayWorker | RunningServer[Gateway]
    streams: ClientStreams | None = None
    """None unless the replica serves clients."""

    async def check_health(self) -> None:
        (self.streams or self.server).check()

    async def __del__(self) -> None:
        await (self.streams or self.server).close()


class WorkerReplica(Replica):
    """Computes prompts and passes their KV on, or writes choices for gateways."""

    server: RayWorker

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, arguments: Arguments, directory: Handle, *, role: Role | None = None
    ) -> None:
        """`role`: None for replicas that decode."""
        settings = settings_here(arguments)
        plan = worker_plan(settings, role or worker_role(settings), place=place_here(), environ=environment())
        self.server = RayWorker(plan, RayDirectory(directory), start_engine=self._start_engine)
        await self.server.start()
        favour_streams()

    async def _start_engine(self, config: EngineConfig) -> LocalEngine:
        return await NativeEngine.start(config)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self.server.load()

    async def wake(self) -> None:
        """Answers, so that the caller knows that a replica is there."""


@serve.ingress(None)
class DirectReplica(WorkerReplica):
    """Writes choices, and serves clients itself."""

    async def __init__(  # type: ignore[misc]
        self, arguments: Arguments, directory: Handle, *, prefill: Handle | None = None
    ) -> None:
        await WorkerReplica.__init__(self, arguments, directory)
        self._records = 0
        self.streams = ClientStreams(self.server, prefill, one_is_ended=one_is_ended)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return self.server.serving.app

    def record_routing_stats(self) -> dict[str, int]:
        """Reports the load to Serve, which passes it to the routers."""
        self._records += 1
        return msgspec.structs.asdict(Record(self._records, self.server.serving.service.key_limits.num_choices))


@serve.ingress(None)
class GatewayReplica(Replica):
    """Serves clients, over workers elsewhere."""

    async def __init__(  # type: ignore[misc]
        self, arguments: Arguments, directory: Handle, *, decode: Handle, prefill: Handle | None = None
    ) -> None:
        plan = gateway_replica_plan(settings_here(arguments), place_here(), environ=environment())
        self.server = await running_gateway(plan, RayDirectory(directory))
        self.streams = ClientStreams(self.server, prefill, one_is_ended=one_is_ended)
        favour_streams()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return self.server.serving.app


@serve.ingress(None)
class RouterReplica:
    """`--prefix-router`: HAProxy asks it which decode replica gets a request, and sends it the body.

    This class and `app` use an internal function of Ray, `Application._with_ingress_request_router`, so a new Ray can
    break them: `options.check_hook` refuses all versions except a known one. What Ray does there:

    1. the router is a deployment of its own; Serve runs one replica of it on each node that has a proxy
    2. for each POST HAProxy asks it: POST /internal/route, with the body (at most 8 MiB of it; X-Body-Truncated says if
       it is not whole) and the session header. Other methods go to the replica with the fewest connections
    3. it answers {"host", "port", "replica_id"}; any other answer, or none within 5 s, is a 503 to the client
    4. HAProxy sends the request there, and the answer back, past Serve's Python
    """

    async def __init__(self, arguments: Arguments, directory: Handle, *, decode: Handle) -> None:  # type: ignore[misc]
        plan = gateway_replica_plan(settings_here(arguments), place_here(), environ=environment())
        self._router = PrefixRouter(plan, RayDirectory(directory))
        self._decode = decode
        decode._init()  # noqa: SLF001  it learns its replicas from now on, not from the first request on
        await self._router.start()
        favour_streams()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.post(ROUTE)(self.route)
        return app

    async def check_health(self) -> None:
        self._router.check()

    async def __del__(self) -> None:
        await self._router.close()

    async def route(self, request: Request) -> Response:
        session = session_id_of(request.headers.items())
        wanted = await self._router.replica(await request.body(), session)
        handle = self._decode.options(session_id=session) if session else self._decode
        async with handle.choose_replica(wanted, _reserve=False) as selection:  # `ChoicesRouter` takes the wanted one
            replica = selection._replica  # noqa: SLF001  of the hook's contract
            host, port = replica.backend_http_endpoint
            answer = {"host": host, "port": port, "replica_id": replica.replica_id.to_full_id_str()}
            return Response(msgspec.json.encode(answer), media_type="application/json")


def settings_here(arguments: Arguments) -> Settings:
    """Resolves the settings with this node's environment, for instance the address of its fast network."""
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


async def one_is_ended() -> bool:
    """Returns True if Serve reports that a replica of this deployment is being ended; False if it does not answer."""
    context = serve.get_replica_context()
    try:
        async with asyncio.timeout(STATUS_S):
            status = await asyncio.to_thread(serve.status)
    except Exception as error:  # Ray may raise anything for a controller that is gone
        logger.info("Serve does not answer: %s", error)
        return False
    application = status.applications.get(context.app_name)
    deployment = None if application is None else application.deployments.get(context.deployment)
    return deployment is None or any(state == STOPPING for state, number in deployment.replica_states.items() if number)
