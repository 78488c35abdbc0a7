"""Runs an app under uvicorn in the test's event loop, and checks that it releases everything."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from motet.api.app import create_app, create_router
from motet.api.served import Models, one_model
from motet.api.service import Membership, Service
from motet.engine import Worker, WorkerReport, WorkerState
from motet.engine_info import EngineInfo
from motet.errors import MotetError, NoWorkerError
from motet.metrics.routing import RoutingFigures
from motet.settings.server_config import ServerConfig
from motet.testing.fake_engine import DuringPrefill, FakeEngine, FakeGroup, Script, fake_info
from motet.text.formats import ModelFormats
from motet.text.tokenizer import Tokenizer
from motet.tracing.spans import NO_TRACES, Tracer
from motet.types import ChoiceStart, GenerateRequest, Role
from tests.patience import PATIENCE_S
from tests.tiny_tokenizer import fake_answer

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

MODEL = "tiny"
SEED = 42
PROMPT = [5, 6, 7, 8]
ROUTES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": PROMPT},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {}},
}


def of_two(path: str) -> dict[str, object]:
    """Returns a body for two choices; for completions, of each of two prompts."""
    if path == "/v1/completions":
        return {"prompt": ["x", "y"], "n": 2}
    return ROUTES[path] | ({"sampling_params": {"n": 2}} if path == "/inference/v1/generate" else {"n": 2})


every_route = pytest.mark.parametrize("path", list(ROUTES))
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])


def events(response: httpx.Response) -> list[str]:
    """Returns the data of all server-sent events of a response."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    return [part.removeprefix("data: ") for part in parts[:-1]]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the events before `[DONE]`, which must come once and at the end."""
    *data, last = events(response)
    assert last == "[DONE]"
    return [json.loads(item) for item in data]


async def next_chunk(lines: AsyncIterator[str]) -> dict[str, Any]:
    """Returns the next chunk of a stream; empty at its end."""
    async for line in lines:
        if line.startswith("data: {"):
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return chunk
    return {}


def hello(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    return fake_answer(f"hello {start.index}")


def saying(*answers: str) -> Script:
    """Makes choice i generate the i-th text."""
    return lambda _, start: fake_answer(answers[start.index % len(answers)])


class WatchedEngine(FakeEngine):
    """Counts its groups in `submitted`. If `gated`, it takes a step each time `steps` is released."""

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

    async def start_request(self, request: Coroutine[Any, Any, httpx.Response]) -> asyncio.Task[httpx.Response]:
        """Starts a request, and returns once the engine has a group of it. Fails if the answer comes before."""
        task = asyncio.create_task(request)
        submitted = asyncio.create_task(self.submitted.acquire())
        await asyncio.wait([task, submitted], return_when=asyncio.FIRST_COMPLETED)
        submitted.cancel()
        assert not task.done()
        return task

    def go(self, steps: int = 100) -> None:
        """Lets the engine take this number of steps."""
        for _ in range(steps):
            self.steps.release()

    def generate(self, request: GenerateRequest) -> FakeGroup:
        group = super().generate(request)
        self.submitted.release()
        return group


class EngineWithoutWorkers(WatchedEngine):
    """An engine of a model whose workers have not started."""

    @property
    def info(self) -> EngineInfo:
        raise NoWorkerError("No worker is ready.")

    @info.setter
    def info(self, info: EngineInfo) -> None:
        """Ignores the value: it has no facts."""


def group_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Returns the fields of the lines in the access log."""
    return [vars(record)["fields"] for record in caplog.records if record.message == "group ended"]


def post_to(path: str) -> Scope:
    """Returns the ASGI scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


def ready(worker: Worker) -> WorkerReport:
    return WorkerReport(
        id=worker.id, address=worker.address, state=WorkerState.READY, role=worker.engine.info.role, worker=worker
    )


class ChangeableWorkers:
    """Workers that a test can change while the server runs."""

    def __init__(self, reports: Sequence[WorkerReport]) -> None:
        self.listed = list(reports)

    def reports(self) -> Sequence[WorkerReport]:
        return tuple(self.listed)


class Routes:
    """Routes that several servers use one after the other, each with its own service. They take 10 ms to make."""

    service: Service

    def __init__(self) -> None:
        self.router = create_router(cast(Service, self))

    def __getattr__(self, name: str) -> object:
        return getattr(self.service, name)


FREE: list[Routes] = []
"""Routes of servers that have ended."""


class Served:
    """One server and its clients."""

    def __init__(self, service: Service, engine: WatchedEngine, *others: WatchedEngine) -> None:
        """`engine`: the engine of its only model, or of its first model."""
        self.service = service
        self.engine = engine
        self._engines = (engine, *others)
        self._routes = FREE.pop() if FREE else Routes()
        self._routes.service = service
        self.app = create_app(service, self._routes.router)
        self._stack = AsyncExitStack()
        self._state = ServerState()

    async def __aenter__(self) -> "Served":
        config = uvicorn.Config(self.app, log_config=None, access_log=False, lifespan="off")
        config.load()
        # uvicorn's protocol without its main loop, which waits in tenths of seconds
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: HttpToolsProtocol(config=config, server_state=self._state, app_state={}), "127.0.0.1", 0
        )
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=self.url, verify=False, timeout=PATIENCE_S)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        if "openai" in vars(self):
            await self.openai.close()
        if "anthropic" in vars(self):
            await self.anthropic.close()
        self._listener.close()
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)
        await self._listener.wait_closed()
        FREE.append(self._routes)
        if error is None:
            self.check()

    @cached_property
    def openai(self) -> AsyncOpenAI:
        http_client = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http_client)

    @cached_property
    def anthropic(self) -> "AsyncAnthropic":
        from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient  # a second that few tests need

        http_client = DefaultAsyncHttpxClient(verify=False)
        return AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0, http_client=http_client)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its only model."""
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
        assert self.service.key_limits.answers.num_bytes == 0

    async def chat(self, content: Any = "hi", **fields: object) -> httpx.Response:
        """Sends a raw chat request. `fields` are added to the body unchanged, also NaN and infinities."""
        body = json.dumps({"messages": [{"role": "user", "content": content}], **fields})
        headers = {"content-type": "application/json"}
        return await self.http.post("/v1/chat/completions", content=body, headers=headers)

    async def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self.http.get("/status")).json()
        return status

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    @property
    def prompt(self) -> str:
        """The text of the prompt of the engine's last request."""
        return self.tokenizer.decode(self.engine.requests[-1].prompt, skip_special_tokens=False)

    async def break_off(self, path: str, headers: str = "") -> None:
        """Starts to send a body, and leaves."""
        _reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: 100\r\n\r\n{{"
        writer.write(head.encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await self.http.get("/version")).status_code == 200

    async def abandon(self, request: asyncio.Task[httpx.Response]) -> None:
        """Lets the client of a request leave before the response, and returns once no group is open."""
        request.cancel()
        await asyncio.wait([request])
        assert request.cancelled()
        await self.until_empty()

    async def until_empty(self) -> None:
        """Returns once no group is open; the test's time-out is the limit."""
        await self.service.admission.empty()
        for engine in self._engines:
            engine.check()


@dataclass
class Serving:
    """Starts servers that run until the end of the test."""

    tokenizer: Tokenizer
    stack: AsyncExitStack

    async def __call__(
        self,
        script: Script = hello,
        *,
        engine: WatchedEngine | None = None,
        placed: WatchedEngine | None = None,
        tokenizer: Tokenizer | None = None,
        formats: ModelFormats | None = None,
        config: ServerConfig | None = None,
        workers: ChangeableWorkers | Sequence[Worker] | None = None,
        figures: RoutingFigures | None = None,
        membership: Membership | None = None,
        takes_tickets: bool = True,
        draw_seed: Callable[[], int] = lambda: SEED,
        tracer: Tracer = NO_TRACES,
        **settings: Any,
    ) -> Served:
        """`settings` are fields of the config, if no `config` is given."""
        tokenizer = tokenizer or self.tokenizer
        engine = engine or WatchedEngine(script)
        config = config or ServerConfig(served_model_name=MODEL, **settings)
        if workers is None:
            workers = [Worker("engine-0", engine, f"{config.host}:{config.port}")]
        if isinstance(workers, Sequence):
            workers = ChangeableWorkers([ready(worker) for worker in workers])
        service = Service(
            one_model(config.served_model_name, engine, tokenizer=tokenizer, formats=formats, placed=placed),
            config,
            workers.reports,
            figures=lambda: figures or RoutingFigures(),
            membership=membership,
            takes_tickets=takes_tickets,
            draw_seed=draw_seed,
            tracer=tracer,
        )
        return await self.stack.enter_async_context(Served(service, engine))

    async def several(
        self,
        models: Models,
        *engines: WatchedEngine,
        config: ServerConfig | None = None,
        tracer: Tracer = NO_TRACES,
    ) -> Served:
        """Starts a server of `models` without workers. Their engines are checked at the end of the test."""
        service = Service(
            models,
            config or ServerConfig(served_model_name=""),
            ChangeableWorkers([]).reports,
            takes_tickets=True,
            draw_seed=lambda: SEED,
            tracer=tracer,
        )
        return await self.stack.enter_async_context(Served(service, *engines))
