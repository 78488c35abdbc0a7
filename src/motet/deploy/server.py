"""One server: workers in processes of their own, here or elsewhere, and text and HTTP in this one, in one event loop.

1. the socket is bound, the tokenizer read: what can be wrong quickly is wrong before a model is loaded
2. the engines start (`deploy.cell`), or the first worker is waited for (`deploy.gateway`); a signal meanwhile ends that
3. ready: requests are served
4. the first signal, or POST /drain: new groups get 503, those that run may finish, for `drain_timeout_s` at most
   the second signal, or the time is up: open groups end with an error event
   nobody is left who decodes: open groups ended with an error event, /health says 503, and the server ends by itself
5. the engines are closed, connections are closed, what watched them ends; no process, socket or file is left
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import IntEnum
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from motet.api.app import create_app
from motet.api.served import OneModel
from motet.api.service import Service
from motet.deploy.cell import Cell, start_cell
from motet.deploy.compose import Router
from motet.deploy.http import HttpServer
from motet.deploy.listen import listen, port_of, url_of
from motet.deploy.open_files import allow_open_files
from motet.deploy.plan import ServerPlan
from motet.deploy.serving import Serving
from motet.deploy.start import StartEngine
from motet.deploy.stop import StopSignals, first_of
from motet.deploy.tokenizer_files import read_files
from motet.engines.remote import prefill_client
from motet.text.formats import ModelFormats
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Outcome(IntEnum):
    """How a server ended; the value is the exit code of its process."""

    STOPPED = 0
    ENGINE_DIED = 70
    STOPPED_BEFORE_READY = 130


class Workforce(Protocol):
    """The workers that a server runs over: engines of this machine (`Cell`), or servers elsewhere (`Gateway`)."""

    @property
    def router(self) -> Router:
        """In front of them."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the server is of no use any more: nobody is left who decodes, or will be."""
        ...

    async def death(self) -> None:
        """Returns once it is dead."""
        ...

    async def watch(self) -> None:
        """Looks after the workers until it is cancelled."""
        ...

    async def close(self) -> None:
        """Ends open groups with `EngineClosedError`, and what was started here. Twice changes nothing; `watch` is over
        before."""
        ...


T = TypeVar("T")

OnReady = Callable[[Serving[Cell]], None]
"""Called once it serves."""


async def run_server(
    plan: ServerPlan, *, start_engine: StartEngine, on_ready: OnReady, signals: StopSignals
) -> Outcome:
    """Runs a server until it is told to stop or nobody is left who decodes. Raises `StartupError`."""
    allow_open_files()
    with listen(plan.server.host, plan.server.port) as listener:
        tokenizer = Tokenizer.load(plan.tokenizer_path, chat_template=plan.chat_template)
        template = ChatTemplate.of(tokenizer)
        formats = ModelFormats.of(tokenizer, template.source, plan.parsers)
        config = msgspec.structs.replace(plan.server, port=port_of(listener))
        address = f"{config.host}:{config.port}"
        async with prefill_client() as client:
            start = start_cell(plan, address=address, start_engine=start_engine, client=client)
            cell = await started(start, signals)
            if cell is None:
                return Outcome.STOPPED_BEFORE_READY
            try:
                service = Service(
                    OneModel.of(config.served_model_name, cell.engine, tokenizer, template, formats),
                    config,
                    workers=cell.router.fleet,
                    figures=cell.figures,
                    tokenizer_files=partial(read_files, plan.tokenizer_path),
                    connect=cell.connect,
                    block_events=cell.endpoint,
                )
                serving = Serving(url_of(listener), create_app(service), service, cell)
                server = Server(service, cell, HttpServer(serving.app, listener), signals)
                return await server.run(lambda: on_ready(serving), plan.death_linger_s)
            finally:
                await cell.close()


async def started(start: Awaitable[T], signals: StopSignals) -> T | None:
    """What the start returns; None if a signal came first."""
    starting = asyncio.ensure_future(start)
    await first_of(asyncio.wait([starting]), signals.drain.wait())
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return None
    return starting.result()


class Server:
    """A server with its workers there."""

    def __init__(self, service: Service, workforce: Workforce, http: HttpServer, signals: StopSignals) -> None:
        self._service = service
        self._workforce = workforce
        self._http = http
        self._signals = signals

    async def run(self, on_ready: Callable[[], None], death_linger_s: float = 0.0) -> Outcome:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._workforce.watch())
            serving = tasks.create_task(self._http.run_until_stopped())
            on_ready()
            await first_of(
                asyncio.wait([serving]),
                self._signals.drain.wait(),
                self._service.drain_asked.wait(),
                self._workforce.death(),
            )
            if not self._workforce.dead:
                await self._drain()
            outcome = Outcome.STOPPED
            if self._workforce.dead:
                outcome = Outcome.ENGINE_DIED
                logger.error("no engine is left to decode; the server ends in %g s", death_linger_s)
                await first_of(self._signals.drain.wait(), timeout_s=death_linger_s)
            watching.cancel()
            await asyncio.wait([watching])  # it would start again what is ended now
            # Before the connections: answers that are still open end with an error event, and close theirs.
            await self._workforce.close()
            self._http.stop(at_once=self._signals.at_once.is_set())
        return outcome

    async def _drain(self) -> None:
        self._service.start_drain()
        limit_s = self._service.config.drain_timeout_s
        logger.info("stopping: answers under way have %g s; a second signal stops at once", limit_s)
        await first_of(
            self._service.drained(), self._signals.at_once.wait(), self._workforce.death(), timeout_s=limit_s
        )
