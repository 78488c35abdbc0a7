"""Runs a server in the loop of the test, with scripted engines that can die."""

import asyncio
from pathlib import Path
from types import TracebackType

import httpx
import msgspec

from motet.config import CellConfig, EngineConfig, RoutingConfig, ServerConfig
from motet.deploy.cell import Cell
from motet.deploy.plan import ServerPlan
from motet.deploy.server import Outcome, run_server
from motet.deploy.serving import Serving
from motet.deploy.stop import StopSignals
from motet.types import Role
from tests.deploy.dying import DyingEngine, Starter

CELL = CellConfig(prefill=1, decode=1, bypass_tokens=0)


class Running:
    """A server from `async with` to its end."""

    def __init__(
        self,
        folder: Path,
        *,
        starter: Starter | None = None,
        cell: CellConfig | None = None,
        role: Role = Role.BOTH,
        restarts: int = 0,
        **server: object,
    ) -> None:
        self.starter = starter or Starter()
        self.signals = StopSignals()
        settings = {"served_model_name": "tiny", "port": 0} | server
        self.plan = ServerPlan(
            EngineConfig(model_path=str(folder), model_name="tiny", role=role),
            msgspec.convert(settings, ServerConfig),
            tokenizer_path=folder,
            chat_template=None,
            cell=cell or CellConfig(),
            routing=RoutingConfig(engine_restarts=restarts),
            death_linger_s=0.2,
        )
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> "Running":
        self.ended = asyncio.ensure_future(
            run_server(self.plan, start_engine=self.starter, on_ready=self._on_ready, signals=self.signals)
        )
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

    @property
    def engine(self) -> DyingEngine:
        """The one that answers, the first of several; of a prefill server the only one."""
        return (self.starter.of(Role.DECODE) or self.starter.engines)[0]

    def _on_ready(self, serving: Serving[Cell]) -> None:
        self.cell = serving.workforce
        self._ready.set_result(serving.url)

    async def chat(self) -> httpx.Response:
        return await self.http.send(self._request())

    async def submitted_chat(self) -> "asyncio.Future[httpx.Response]":
        """A chat that waits for its first token."""
        response = asyncio.ensure_future(self.chat())
        await self.engine.submitted.wait()
        return response

    async def begun_chat(self) -> httpx.Response:
        """A chat whose first tokens are there, to be read on."""
        self.engine.steps.release()
        return await self.http.send(self._request(), stream=True)

    def _request(self) -> httpx.Request:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2}
        return self.http.build_request("POST", "/v1/chat/completions", json=body)

    async def outcome(self) -> Outcome:
        return await self.ended
