"""Prefill replicas as members of the fleet of a decode replica that serves clients itself.

They are asked as a gateway asks its workers: one call a group, with token ids; their health, cached blocks and KV
addresses are known, and one that was started again is met again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from motet.config import GatewayConfig
from motet.deploy.cell import Cell
from motet.deploy.compose import Router
from motet.deploy.discover import FoundServer
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_parts import GatewayRules
from motet.deploy.ray.following import Following, ListedWorkers
from motet.deploy.serving import Serving
from motet.deploy.stop import first_of
from motet.deploy.ways import MotetWay
from motet.engines.calls import server_client
from motet.engines.remote import EngineServer
from motet.engines.wire import EngineReport
from motet.errors import EngineError
from motet.routing.text_routed import TextRouted
from motet.settings.named_worker import NamedWorker
from motet.types import EngineKind, Role


class OneModelOnly:
    """What a decode replica has to learn of a prefill replica: nothing, but that both have one model."""

    def __init__(self, router: Router, model: str) -> None:
        self.texts = TextRouted(router.fleet)
        self._model = model

    async def learn(self, report: EngineReport, server: FoundServer) -> None:
        if report.info.model != self._model:
            raise EngineError(f"{server.url} has the model {report.info.model}, and this replica has {self._model}")


@contextlib.asynccontextmanager
async def prefill_members(
    serving: Serving[Cell], following: Following, *, api_key: str, worker_timeout_s: float, drain_s: float
) -> AsyncIterator[asyncio.Task[None]]:
    """They join and leave as the directory says while it is entered, by the task it gives; those that are there have
    joined when it is."""
    router = serving.workforce.router
    async with server_client() as client:

        def server_at(named: NamedWorker) -> FoundServer:
            way = MotetWay(EngineServer(named.url, client, api_key=api_key))
            return FoundServer(named.url, {EngineKind.MOTET: lambda: way}, EngineKind.MOTET)

        members = Gateway(
            router,
            OneModelOnly(router, serving.workforce.workers[0].engine.info.model),
            GatewayConfig(worker_timeout_s=worker_timeout_s),
            server_at=server_at,
            rules=GatewayRules(drain_s, introduces=False),
            listed=ListedWorkers(following, (Role.PREFILL,)),
        )
        watching = asyncio.create_task(members.watch())
        try:
            await first_of(members.looked(), asyncio.wait([watching]))
            yield watching
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await members.close()
