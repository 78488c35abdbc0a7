"""A complete server with a scripted engine, in a thread, for clients that block or run in their own process."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from motet.deploy.cell import Cell
from motet.deploy.server import Outcome, Serving, run_server
from motet.deploy.server_plan import ServerPlan
from motet.deploy.shutdown import StopSignals
from motet.engine_orders import AdapterOrder, Done, EngineFacts, EngineOrder, OrderAnswer
from motet.settings.engine_config import EngineConfig
from motet.settings.server_config import ServerConfig
from motet.testing.fake_adapters import with_adapters
from motet.testing.fake_engine import FakeEngine, Script, fake_info
from motet.text.formats import ParserNames

MODEL = "tiny"


class ImmortalEngine(FakeEngine):
    """A scripted engine with the interface that a cell needs. It never dies. Orders have no effect on it, except for
    those about adapters."""

    def __init__(self, script: Script, *, max_model_len: int, max_adapters: int) -> None:
        super().__init__(script, info=fake_info(max_model_len=max_model_len, max_adapters=max_adapters))
        self.died = asyncio.Event()

    async def send(self, order: EngineOrder) -> OrderAnswer:
        if not isinstance(order, AdapterOrder):
            return Done()
        self.info = with_adapters(self.info, order)
        return EngineFacts(self.info)

    def kill(self) -> None:
        raise AssertionError


class FakeServer:
    """Serves a script while the `with` lasts, and checks at its end that every group has ended. `folder` has a
    tokenizer."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        *,
        api_key: str | None = None,
        name: str = MODEL,
        port: int = 0,
        max_model_len: int = 4096,
        max_adapters: int = 0,
        parsers: ParserNames | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are further fields of `ServerConfig`."""
        self.engine = ImmortalEngine(script, max_model_len=max_model_len, max_adapters=max_adapters)
        self._plan = ServerPlan(
            EngineConfig(model_path=str(folder), model_name=name),
            ServerConfig(port=port, served_model_name=name, api_keys=(api_key,) if api_key else (), **settings),
            tokenizer_path=folder,
            chat_template=None,
            parsers=parsers or ParserNames(),
        )
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._ready: Future[str] = Future()

    @property
    def url(self) -> str:
        return self._ready.result()

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        self._ready.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._signals.receive)
        self._thread.join()
        if error is None:
            self.engine.check()

    def stop_at_once(self) -> None:
        """Ends the server without waiting for requests in progress, which are answered with an error."""
        for _ in range(2):
            self._loop.call_soon_threadsafe(self._signals.receive)

    async def _serve(self) -> Outcome:
        self._loop = asyncio.get_running_loop()
        self._signals = StopSignals()
        return await run_server(self._plan, start_engine=self._start, on_ready=self._on_ready, signals=self._signals)

    async def _start(self, _: EngineConfig) -> ImmortalEngine:
        return self.engine

    def _on_ready(self, serving: Serving[Cell]) -> None:
        self._ready.set_result(serving.url)
