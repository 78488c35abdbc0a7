"""Runs an app under uvicorn in the loop of the test, and checks that nothing was left behind."""

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType

import httpx
import uvicorn
from openai import AsyncOpenAI

from motet.api.app import create_app
from motet.api.service import Service
from motet.config import ServerConfig
from motet.engines.fake import FakeEngine, Script
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceStart, GenerateRequest
from tests.tiny_tokenizer import fake_answer

MODEL = "tiny"
SEED = 42


def hello(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    return fake_answer(f"hello {start.index}")


def saying(*answers: str) -> Script:
    """Choice i answers the i-th text."""
    return lambda _, start: fake_answer(answers[start.index % len(answers)])


class Served:
    """One server and its clients."""

    def __init__(self, service: Service, engine: FakeEngine) -> None:
        self.service = service
        self.engine = engine
        self.app = create_app(service)
        self.port = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Served":
        config = uvicorn.Config(
            self.app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        server = uvicorn.Server(config)
        self._server = server
        self._task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0)
        self.http = await self._stack.enter_async_context(httpx.AsyncClient(base_url=self.url))
        self.openai = await self._stack.enter_async_context(
            AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._server.should_exit = True
        await self._task
        if error is None:
            self.check()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def check(self) -> None:
        self.engine.check()
        self.service.admission.check()
        assert self.service.admission.open == 0

    async def until_empty(self) -> None:
        """Returns once no group is open; the test's time-out is the limit."""
        await self.service.drained()
        self.engine.check()


@dataclass
class Serving:
    """Starts servers that live as long as the test."""

    tokenizer: Tokenizer
    stack: AsyncExitStack

    async def __call__(
        self,
        script: Script = hello,
        *,
        engine: FakeEngine | None = None,
        tokenizer: Tokenizer | None = None,
        config: ServerConfig | None = None,
    ) -> Served:
        tokenizer = tokenizer or self.tokenizer
        engine = engine or FakeEngine(script)
        service = Service(
            engine,
            tokenizer,
            ChatTemplate.of(tokenizer),
            config or ServerConfig(served_model_name=MODEL),
            draw_seed=lambda: SEED,
        )
        return await self.stack.enter_async_context(Served(service, engine))
