"""Runs servers in the test's own event loop, with scripted engines that can die."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, Self, TypeVar

import httpx
import msgspec

from motet.deploy.cell import Cell
from motet.deploy.gateway import Gateway
from motet.deploy.server import Outcome, Serving, run_server
from motet.deploy.server_plan import ServerPlan
from motet.deploy.shutdown import StopSignals
from motet.deploy.tls.certificates import Certificates, no_certificates
from motet.engine import WorkerState
from motet.routing.workers.fleet import Fleet
from motet.settings.engine_config import EngineConfig
from motet.settings.server_config import CellConfig, RoutingConfig, ServerConfig
from motet.types import Role
from tests.deploy.dying import ANSWER, DyingEngine, Starter
from tests.patience import PATIENCE_S

CELL = CellConfig(prefill=1, decode=1, bypass_tokens=0)
NO_DEFAULTS: Mapping[str, int | float] = {}
NO_SERVERS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
"""Addresses at which no server listens."""


W = TypeVar("W", Cell, Gateway)


class InLoop(Generic[W]):
    """A server in the test's own event loop, which runs while the `async with` lasts."""

    def __init__(self, run: Callable[..., Awaitable[Outcome]], *, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: context of the client `http`, for a server with TLS."""
        self.signals = StopSignals()
        self._tls = tls
        self._run = partial(run, on_ready=self._on_ready, signals=self.signals)
        self._ready: asyncio.Future[Serving[W]] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self.ended = asyncio.ensure_future(self._run())
        await asyncio.wait((self.ended, self._ready), return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            self.http = httpx.AsyncClient(base_url=self.serving.url, timeout=PATIENCE_S, verify=self._tls or True)
            await until_reported(self.serving.workforce.router.fleet)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.signals.receive()
        self.signals.receive()
        await asyncio.wait((self.ended,))
        if self._ready.done():
            await self.http.aclose()
            if error is None:
                self.check()

    @property
    def serving(self) -> Serving[W]:
        return self._ready.result()

    def check(self) -> None:
        """Raises if anything is left after an end without errors. Overridden by subclasses."""

    async def outcome(self) -> Outcome:
        return await self.ended

    def _on_ready(self, serving: Serving[W]) -> None:
        self._ready.set_result(serving)


async def until_reported(fleet: Fleet) -> None:
    """Returns when every worker that can answer has answered: on a machine that stops for a second, the first request
    gets no answer in time."""
    while any(one.state is WorkerState.STARTING and one.address not in NO_SERVERS for one in fleet.members):
        await fleet.changes.wait()


class Running(InLoop[Cell]):
    """A server with scripted engines."""

    def __init__(
        self,
        folder: Path,
        *,
        starter: Starter | None = None,
        cell: CellConfig | None = None,
        role: Role = Role.BOTH,
        cluster_key: str = "",
        restarts: int = 0,
        linger_s: float = 0.2,
        adapters: tuple[str, ...] = (),
        certificates: Certificates | None = None,
        tls: ssl.SSLContext | None = None,
        defaults: Mapping[str, int | float] = NO_DEFAULTS,
        **server: object,
    ) -> None:
        """`defaults`: the defaults of sampling fields."""
        self.starter = starter or Starter()
        settings = {"served_model_name": "tiny", "port": 0} | server
        plan = ServerPlan(
            EngineConfig(
                model_path=str(folder),
                model_name="tiny",
                role=role,
                cluster_key=cluster_key,
                default_sampling_params=defaults,
                adapters=adapters,
            ),
            msgspec.convert(settings, ServerConfig),
            tokenizer_path=folder,
            chat_template=None,
            cell=cell or CellConfig(),
            routing=RoutingConfig(engine_restarts=restarts),
            death_linger_s=linger_s,
            longest_backoff_s=0.02,
            certificates=certificates or no_certificates(),
        )
        super().__init__(partial(run_server, plan, start_engine=self.starter), tls=tls)

    @property
    def cell(self) -> Cell:
        return self.serving.workforce

    @property
    def engine(self) -> DyingEngine:
        """The engine that answers: the first decode engine, or the only engine of a prefill server."""
        return (self.starter.of(Role.DECODE) or self.starter.engines)[0]

    async def chat(self) -> httpx.Response:
        return await self.http.send(self._request())

    async def submitted_chat(self) -> "asyncio.Future[httpx.Response]":
        """Sends a chat, and returns while it waits for its first token."""
        self.engine.submitted.clear()  # a request before this one can have set it
        response = asyncio.ensure_future(self.chat())
        await self.engine.submitted.wait()
        return response

    async def started_chat(self) -> httpx.Response:
        """Sends a chat, and returns when its first tokens can be read."""
        self.engine.steps.release()
        return await self.http.send(self._request(), stream=True)

    def _request(self) -> httpx.Request:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2}
        return self.http.build_request("POST", "/v1/chat/completions", json=body)


def is_complete(stream: str) -> bool:
    """Returns True if both choices of the chat finished."""
    return stream.count('"finish_reason":"stop"') == 2 and stream.endswith("data: [DONE]\n\n")


def texts(stream: str) -> list[str]:
    """Returns the texts of both choices, and fails unless the stream ended well."""
    *events, last = [part.removeprefix("data: ") for part in stream.split("\n\n") if part]
    assert last == "[DONE]", stream
    texts = ["", ""]
    finished = 0
    for event in events:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            finished += choice["finish_reason"] == "stop"
    assert finished == 2, stream
    return texts


EXPECTED = [ANSWER, ANSWER]
