"""Runs `serve_single` in the loop of the test, with a scripted engine that can die."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import msgspec

from motet.config import EngineConfig, ServerConfig
from motet.deploy.single import MortalEngine, Outcome, SinglePlan, serve_single
from motet.deploy.stop import StopSignals
from motet.engines.fake import FakeEngine, FakeGroup
from motet.errors import EngineDiedError, MotetError
from motet.types import ChoiceStart, EngineInfo, EngineStats, GenerateRequest
from tests.tiny_tokenizer import fake_answer

ANSWER = "the hand and the other hand"


def script(_: GenerateRequest, __: ChoiceStart) -> list[int]:
    return fake_answer(ANSWER)


class DyingEngine(FakeEngine):
    """Takes a step when `steps` is released; `die` ends it as the death of its process would."""

    def __init__(self) -> None:
        self.steps = asyncio.Semaphore(0)
        super().__init__(script, gate=self.steps)
        self.died = asyncio.Event()
        self.submitted = asyncio.Event()

    def generate(self, request: GenerateRequest) -> FakeGroup:
        self.submitted.set()
        return super().generate(request)

    def die(self) -> None:
        self.fail_after = dict.fromkeys(range(1000), EngineDiedError("the engine process ended"))
        self.died.set()
        self.let_run()

    def let_run(self) -> None:
        for _ in range(1000):
            self.steps.release()

    async def close(self) -> None:
        """Open groups end with EngineClosedError, as those of the native engine."""
        self.closed = True
        self.let_run()

    async def stats(self) -> EngineStats:
        if self.died.is_set():
            raise EngineDiedError("the engine process ended")
        return await super().stats()


@dataclass
class Starter:
    """Stands for `NativeEngine.start`."""

    engine: DyingEngine
    hangs: bool = False
    error: MotetError | None = None
    cancelled: bool = False

    async def __call__(self, config: EngineConfig) -> MortalEngine:
        if self.error:
            raise self.error
        if self.hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return self.engine


class Running:
    """A server from `async with` to its end."""

    def __init__(self, folder: Path, *, starter: Starter | None = None, **server: object) -> None:
        self.starter = starter or Starter(DyingEngine())
        self.engine = self.starter.engine
        self.signals = StopSignals()
        settings = {"served_model_name": "tiny", "port": 0} | server
        self.plan = SinglePlan(
            EngineConfig(model_path=str(folder), model_name="tiny"),
            msgspec.convert(settings, ServerConfig),
            tokenizer_path=folder,
            chat_template=None,
            death_linger_s=0.2,
        )
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> "Running":
        self.ended = asyncio.ensure_future(
            serve_single(self.plan, start_engine=self.starter, on_ready=self._on_ready, signals=self.signals)
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

    def _on_ready(self, url: str, info: EngineInfo) -> None:
        self._ready.set_result(url)

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
