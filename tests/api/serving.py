"""Runs an app under uvicorn in the loop of the test, and checks that nothing was left behind."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
import uvicorn
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from motet.api.app import create_app
from motet.api.membership import Membership
from motet.api.served import Models, OneModel
from motet.api.service import Service
from motet.config import ServerConfig
from motet.engines.base import Worker, WorkerReport, Workers, WorkerState
from motet.engines.fake import DuringPrefill, FakeEngine, FakeGroup, Script, fake_info
from motet.errors import MotetError
from motet.metrics.routing import RoutingFigures
from motet.text.formats import ModelFormats
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceStart, GenerateRequest, Role
from tests.tiny_tokenizer import fake_answer

MODEL = "tiny"
SEED = 42


def events(response: httpx.Response) -> list[str]:
    """The data of the server-sent events of a whole response."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    return [part.removeprefix("data: ") for part in parts[:-1]]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The events before `[DONE]`, which must be the last and the only one of its kind."""
    *data, last = events(response)
    assert last == "[DONE]"
    return [json.loads(item) for item in data]


def hello(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    return fake_answer(f"hello {start.index}")


def saying(*answers: str) -> Script:
    """Choice i answers the i-th text."""
    return lambda _, start: fake_answer(answers[start.index % len(answers)])


class WatchedEngine(FakeEngine):
    """Says when a group has been submitted. With `gated`, a step is taken each time `gate` is released."""

    def __init__(
        self,
        script: Script = hello,
        *,
        role: Role = Role.BOTH,
        gated: bool = False,
        fail_after: dict[int, MotetError] | None = None,
        during_prefill: DuringPrefill | None = None,
    ) -> None:
        self.steps = asyncio.Semaphore(0)
        super().__init__(
            script,
            info=fake_info(role=role),
            gate=self.steps if gated else None,
            fail_after=fail_after,
            during_prefill=during_prefill,
        )
        self.submitted = asyncio.Semaphore(0)

    def generate(self, request: GenerateRequest) -> FakeGroup:
        group = super().generate(request)
        self.submitted.release()
        return group


def ready(worker: Worker) -> WorkerReport:
    return WorkerReport(
        id=worker.id, address=worker.address, state=WorkerState.READY, role=worker.engine.info.role, worker=worker
    )


class ListedWorkers:
    """Workers that a test may change while the server runs."""

    def __init__(self, reports: Sequence[WorkerReport]) -> None:
        self.listed = list(reports)

    def reports(self) -> Sequence[WorkerReport]:
        return tuple(self.listed)


class Served:
    """One server and its clients."""

    def __init__(self, service: Service, engine: WatchedEngine, *others: WatchedEngine) -> None:
        """`engine`: of its only model, or the first of several."""
        self.service = service
        self.engine = engine
        self._engines = (engine, *others)
        self.app = create_app(service)
        self._stack = AsyncExitStack()
        self._state = ServerState()

    async def __aenter__(self) -> "Served":
        config = uvicorn.Config(self.app, log_config=None, access_log=False, lifespan="off")
        config.load()
        # uvicorn's protocol without its main loop, which ticks and waits in tenths of seconds
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: HttpToolsProtocol(config=config, server_state=self._state, app_state={}), "127.0.0.1", 0
        )
        self.http = await self._stack.enter_async_context(httpx.AsyncClient(base_url=self.url, verify=False))
        self.openai = await self._stack.enter_async_context(
            AsyncOpenAI(
                base_url=f"{self.url}/v1",
                api_key="none",
                max_retries=0,
                http_client=DefaultAsyncHttpxClient(verify=False),
            )
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._listener.close()
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)
        await self._listener.wait_closed()
        if error is None:
            self.check()

    @property
    def tokenizer(self) -> Tokenizer:
        """Of its only model."""
        return self.service.only_model().tokenizer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    def check(self) -> None:
        for engine in self._engines:
            engine.check()
        self.service.admission.check()
        assert self.service.admission.open == 0
        assert self.service.key_limits.clients == {}

    async def chat(self, content: str = "hi", **fields: object) -> httpx.Response:
        """A raw chat request; `fields` go into the body as they are, also what no client of JSON would send."""
        body = json.dumps({"messages": [{"role": "user", "content": content}], **fields})
        headers = {"content-type": "application/json"}
        return await self.http.post("/v1/chat/completions", content=body, headers=headers)

    async def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    async def until_empty(self) -> None:
        """Returns once no group is open; the test's time-out is the limit."""
        await self.service.drained()
        for engine in self._engines:
            engine.check()


@dataclass
class Serving:
    """Starts servers that live as long as the test."""

    tokenizer: Tokenizer
    stack: AsyncExitStack

    async def __call__(  # sizes: what a server may be made of
        self,
        script: Script = hello,
        *,
        engine: WatchedEngine | None = None,
        tokenizer: Tokenizer | None = None,
        formats: ModelFormats | None = None,
        config: ServerConfig | None = None,
        workers: Workers | Sequence[Worker] | None = None,
        figures: RoutingFigures | None = None,
        membership: Membership | None = None,
    ) -> Served:
        tokenizer = tokenizer or self.tokenizer
        engine = engine or WatchedEngine(script)
        config = config or ServerConfig(served_model_name=MODEL)
        if isinstance(workers, Sequence):
            workers = ListedWorkers([ready(worker) for worker in workers])
        service = Service(
            OneModel.of(config.served_model_name, engine, tokenizer, formats=formats),
            config,
            workers=workers,
            figures=lambda: figures or RoutingFigures(),
            membership=membership,
            draw_seed=lambda: SEED,
        )
        return await self.stack.enter_async_context(Served(service, engine))

    async def several(self, models: Models, *engines: WatchedEngine, config: ServerConfig | None = None) -> Served:
        """A server of `models`, whose engines are looked at when the test ends; it has no workers to show."""
        service = Service(
            models,
            config or ServerConfig(served_model_name=""),
            workers=ListedWorkers([]),
            draw_seed=lambda: SEED,
        )
        return await self.stack.enter_async_context(Served(service, *engines))
