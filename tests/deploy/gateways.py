"""Runs a gateway in the test's own event loop, with servers in the same loop as workers, over real sockets."""

import ssl
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from motet.api.service import Service
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_models import TokenizerRules
from motet.deploy.server import first_models, make_gateway, run_gateway
from motet.deploy.server_plan import GatewayPlan
from motet.deploy.tls.certificates import Certificates, no_certificates
from motet.engine import WorkerState
from motet.engines.http import server_client
from motet.errors import StartupError
from motet.sampling_defaults import DefaultRules
from motet.settings.gateway_config import GatewayConfig
from motet.settings.server_config import CellConfig, RoutingConfig, ServerConfig
from tests.deploy.running import InLoop, Running, until_reported

HEARTBEAT_S = 0.02
ADMIN = {"authorization": "Bearer admin"}
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2, "seed": 3}


def address(server: Running) -> str:
    return str(server.http.base_url)


def id_of(server: Running) -> str:
    return f"127.0.0.1:{server.http.base_url.port}"


def plan_of(
    *workers: Running | str,
    file: Path | None = None,
    gateway: dict[str, object] | None = None,
    routing: RoutingConfig | None = None,
    tokenizers: TokenizerRules | None = None,
    certificates: Certificates | None = None,
    defaults: DefaultRules | None = None,
    **server: object,
) -> GatewayPlan:
    settings = {"served_model_name": "", "port": 0, "admin_key": "admin"} | server
    named = {"workers": [worker if isinstance(worker, str) else address(worker) for worker in workers]}
    return GatewayPlan(
        msgspec.convert({**named, "workers_file": file and str(file), **(gateway or {})}, GatewayConfig),
        msgspec.convert(settings, ServerConfig),
        tokenizers=tokenizers or TokenizerRules({}),
        defaults=defaults or DefaultRules(),
        routing=routing or RoutingConfig(migration_wait_s=0.0),
        cell=CellConfig(bypass_tokens=0),
        heartbeat_s=HEARTBEAT_S,
        certificates=certificates or no_certificates(),
    )


async def failure_without_workers(plan: GatewayPlan) -> str:
    """Returns the error of a gateway that finds no worker in time. Its time starts when a report of every worker has
    been requested, which can take any time on a busy machine."""
    async with server_client() as client:
        gateway, models = make_gateway(plan, client)
        async with gateway.watched():
            await until_reported(gateway.router.fleet)
        with pytest.raises(StartupError) as caught:
            await first_models(gateway, models, timeout_s=0.0)
        await gateway.close()
    return caught.value.message


class RunningGateway(InLoop[Gateway]):
    def __init__(self, *workers: Running | str, tls: ssl.SSLContext | None = None, **settings: Any) -> None:
        """`tls`: as in `InLoop`; `settings`: settings of `plan_of`."""
        super().__init__(partial(run_gateway, plan_of(*workers, **settings)), tls=tls)

    @property
    def gateway(self) -> Gateway:
        return self.serving.workforce

    @property
    def service(self) -> Service:
        return self.serving.service

    @property
    def models(self) -> list[str]:
        return self.service.model_names

    def check(self) -> None:
        self.gateway.router.fleet.check()

    async def until_state(self, server: Running | str, state: WorkerState | None) -> None:
        """Returns when the worker is in that state; None means that it has been removed."""
        fleet = self.gateway.router.fleet
        id = server if isinstance(server, str) else id_of(server)
        while (member.state if (member := fleet.get(id)) else None) is not state:
            await fleet.changes.wait()

    async def chat(self) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=BODY)

    async def started_chat(self, *servers: Running) -> tuple[httpx.Response, Running, list[Running]]:
        """Returns a chat with its first tokens, the server that generates it, and the other servers."""
        for server in servers:
            server.engine.steps.release()
        response = await self.http.send(self.http.build_request("POST", "/v1/chat/completions", json=BODY), stream=True)
        (generating,) = [server for server in servers if server.engine.open]
        return response, generating, [server for server in servers if server is not generating]
