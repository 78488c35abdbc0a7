"""One server: an engine in a process of its own, and text and HTTP in this one, in one event loop.

1. the socket is bound, the tokenizer read: what can be wrong quickly is wrong before the model is loaded
2. the engine starts; a signal meanwhile ends it again
3. ready: requests are served
4. the first signal: new groups get 503, those that run may finish, for `drain_timeout_s` at most
   the second signal, or the time is up: open groups end with an error event
   the engine died: open groups ended with an error event, /health says 503, and the server ends by itself
5. the engine is closed, connections are closed; no process, socket or file is left
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import msgspec

from motet.api.app import create_app
from motet.api.service import Service
from motet.config import EngineConfig, ServerConfig
from motet.deploy.http import HttpServer
from motet.deploy.listen import listen, port_of, url_of
from motet.deploy.stop import StopSignals, first_of
from motet.engines.base import Engine
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import EngineInfo

logger = logging.getLogger(__name__)


class Outcome(IntEnum):
    """How a server ended; the value is the exit code of its process."""

    STOPPED = 0
    ENGINE_DIED = 70
    STOPPED_BEFORE_READY = 130


class MortalEngine(Engine, Protocol):
    """An engine whose process may end by itself."""

    @property
    def died(self) -> asyncio.Event: ...


StartEngine = Callable[[EngineConfig], Awaitable[MortalEngine]]
OnReady = Callable[[str, EngineInfo], None]
"""Called with the server's URL once it serves."""


@dataclass(frozen=True)
class SinglePlan:
    """All that makes up one server."""

    engine: EngineConfig
    server: ServerConfig
    tokenizer_path: Path
    chat_template: str | None
    """Jinja text in place of the model's own."""
    death_linger_s: float = 2.0
    """A server without an engine answers 503 for so long, for health checks to see and clients to read their error."""


async def serve_single(
    plan: SinglePlan, *, start_engine: StartEngine, on_ready: OnReady, signals: StopSignals
) -> Outcome:
    """Runs a server until it is told to stop or its engine dies. Raises `StartupError`."""
    with listen(plan.server.host, plan.server.port) as listener:
        tokenizer = Tokenizer.load(plan.tokenizer_path, chat_template=plan.chat_template)
        template = ChatTemplate.of(tokenizer)
        engine = await started(start_engine(plan.engine), signals)
        if engine is None:
            return Outcome.STOPPED_BEFORE_READY
        try:
            server = msgspec.structs.replace(plan.server, port=port_of(listener))
            service = Service(engine, tokenizer, template, server)
            single = Single(service, engine, HttpServer(create_app(service), listener), signals)
            return await single.run(lambda: on_ready(url_of(listener), engine.info), plan.death_linger_s)
        finally:
            await engine.close()


async def started(start: Awaitable[MortalEngine], signals: StopSignals) -> MortalEngine | None:
    """The engine; None if a signal came first."""
    starting = asyncio.ensure_future(start)
    await first_of(asyncio.wait([starting]), signals.drain.wait())
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return None
    return starting.result()


class Single:
    """A server with its engine running."""

    def __init__(self, service: Service, engine: MortalEngine, http: HttpServer, signals: StopSignals) -> None:
        self._service = service
        self._engine = engine
        self._http = http
        self._signals = signals

    async def run(self, on_ready: Callable[[], None], death_linger_s: float) -> Outcome:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._http.run_until_stopped())
            on_ready()
            await first_of(asyncio.wait([serving]), self._signals.drain.wait(), self._engine.died.wait())
            if not self._engine.died.is_set():
                await self._drain()
            outcome = Outcome.STOPPED
            if self._engine.died.is_set():
                outcome = Outcome.ENGINE_DIED
                logger.error("the engine process died; the server ends in %g s", death_linger_s)
                await first_of(self._signals.drain.wait(), timeout_s=death_linger_s)
            # Before the connections: answers that are still open end with an error event, and close theirs.
            await self._engine.close()
            self._http.stop(at_once=self._signals.at_once.is_set())
        return outcome

    async def _drain(self) -> None:
        self._service.start_drain()
        limit_s = self._service.config.drain_timeout_s
        logger.info("stopping: answers under way have %g s; a second signal stops at once", limit_s)
        await first_of(
            self._service.drained(), self._signals.at_once.wait(), self._engine.died.wait(), timeout_s=limit_s
        )
