"""Runs a gateway in the loop of the test, in front of servers that run there too, over real sockets."""

import asyncio
from pathlib import Path
from types import TracebackType

import httpx
import msgspec

from motet.config import CellConfig, GatewayConfig, RoutingConfig, ServerConfig
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_server import GatewayPlan, run_gateway
from motet.deploy.server import Outcome
from motet.deploy.serving import Serving
from motet.deploy.stop import StopSignals
from motet.deploy.tokenizers import TokenizerRules
from motet.engines.base import WorkerState
from tests.deploy.running import Running

HEARTBEAT_S = 0.02
ADMIN = {"authorization": "Bearer admin"}
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2, "seed": 3}


def address(server: Running) -> str:
    return str(server.http.base_url)


def id_of(server: Running) -> str:
    return f"127.0.0.1:{server.http.base_url.port}"


class RunningGateway:
    """A gateway from `async with` to its end."""

    def __init__(
        self,
        *workers: Running | str,
        file: Path | None = None,
        gateway: dict[str, object] | None = None,
        routing: RoutingConfig | None = None,
        tokenizers: TokenizerRules | None = None,
        **server: object,
    ) -> None:
        settings = {"served_model_name": "", "port": 0, "admin_key": "admin"} | server
        named = {"workers": [worker if isinstance(worker, str) else address(worker) for worker in workers]}
        self.plan = GatewayPlan(
            msgspec.convert({**named, "workers_file": file and str(file), **(gateway or {})}, GatewayConfig),
            msgspec.convert(settings, ServerConfig),
            tokenizers=tokenizers or TokenizerRules({}),
            routing=routing or RoutingConfig(migration_wait_s=0.0),
            cell=CellConfig(bypass_tokens=0),
            heartbeat_s=HEARTBEAT_S,
        )
        self.signals = StopSignals()
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> "RunningGateway":
        self.ended = asyncio.ensure_future(run_gateway(self.plan, on_ready=self._on_ready, signals=self.signals))
        await asyncio.wait((self.ended, self._ready), return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            self.http = httpx.AsyncClient(base_url=self._ready.result())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signals.ask()
        self.signals.ask()
        await asyncio.wait((self.ended,))
        if self._ready.done():
            await self.http.aclose()
            if error is None:
                self.gateway.router.fleet.check()

    @property
    def models(self) -> list[str]:
        return self.service.model_names

    async def outcome(self) -> Outcome:
        return await self.ended

    async def until_state(self, server: Running | str, state: WorkerState | None) -> None:
        """Returns once the worker is so; None: not known any more."""
        fleet = self.gateway.router.fleet
        id = server if isinstance(server, str) else id_of(server)
        while (member.state if (member := fleet.get(id)) else None) is not state:
            await fleet.changed()

    async def chat(self) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=BODY)

    async def begun_chat(self, *servers: Running) -> tuple[httpx.Response, Running]:
        """A chat whose first tokens are there, and the server that writes it."""
        for server in servers:
            server.engine.steps.release()
        response = await self.http.send(self.http.build_request("POST", "/v1/chat/completions", json=BODY), stream=True)
        (writing,) = [server for server in servers if server.engine.open]
        return response, writing

    def _on_ready(self, serving: Serving[Gateway]) -> None:
        self.gateway = serving.workforce
        self.service = serving.service
        self._ready.set_result(serving.url)
