"""`--prefix-router`: HAProxy asks a router of ours which decode replica gets a request, and shows it the body.

This is the one place that uses what Ray keeps to itself, `Application._with_ingress_request_router`, and so the one
that a new Ray can break: `direct_ingress.check_hook` refuses any but the version it is known in. What Ray does there:

1. the router is a deployment of its own; Serve runs one replica of it on each node that has a proxy
2. for each POST HAProxy asks it: POST /internal/route, with the body (at most 8 MiB of it; X-Body-Truncated says if it
   is not whole) and the session header. Other methods go to the replica with the fewest connections
3. it answers {"host", "port", "replica_id"}; any other answer, or none within 5 s, is a 503 to the client
4. HAProxy sends the request there, and the answer back, past Serve's Python
"""

import msgspec
from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve import Application

from motet.api.caller import session_id_of
from motet.config import environment
from motet.deploy.heap import freeze_heap
from motet.deploy.ray.deployments import Arguments, place_here, settings_here
from motet.deploy.ray.handles import Handle, RayDirectory
from motet.deploy.ray.options import MANY_REQUESTS
from motet.deploy.ray.prefix_router import PrefixRouter
from motet.deploy.ray.replica_plans import gateway_plan

ROUTER = "router"
ROUTE = "/internal/route"


@serve.ingress(None)
class RouterReplica:
    """Answers HAProxy."""

    async def __init__(self, arguments: Arguments, directory: Handle, decode: Handle) -> None:  # type: ignore[misc]
        plan = gateway_plan(settings_here(arguments), place_here(), environ=environment())
        self._router = PrefixRouter(plan, RayDirectory(directory))
        self._decode = decode
        decode._init()  # noqa: SLF001  it learns its replicas from now on, not from the first request on
        await self._router.start()
        freeze_heap()

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


def with_prefix_router(decode: Application, arguments: Arguments, directory: Application) -> Application:
    """The application whose ingress is `decode`, with the router."""
    router = serve.deployment(
        name=ROUTER,
        max_ongoing_requests=MANY_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=1.0,
    )(RouterReplica).bind(arguments, directory, decode)
    return decode._with_ingress_request_router(router)  # noqa: SLF001  this is the hook
