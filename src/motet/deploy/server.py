"""One server: HTTP and text processing in this process, in one event loop; engines in processes of their own, or
workers on other servers.

1. the socket is bound, and the tokenizer or the workers' file is read, so that simple mistakes are found at once
2. the engines start (`deploy.cell`), or the server waits for the first worker that answers and for its tokenizer
   (`deploy.gateway`); a signal during this time ends the server
3. ready: requests are served
4. the first signal, or POST /drain: new groups get 503, and running groups have `drain_timeout_s` to finish
   the second signal, or the end of that time: open groups end with an error event
   no engine is left to decode: open groups have ended with an error event, /health returns 503, and the server ends
5. the engines, connections and the tasks that watched them are closed; no process, socket or file is left
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import anyio
from fastapi import FastAPI

from motet.api.app import create_app
from motet.api.batches.runner import batch_runner
from motet.api.batches.store import batch_store
from motet.api.served import Models, ModelWithAdapters, served_model
from motet.api.service import Membership, Service
from motet.control.nccl_receiver import NcclReceiver, cuda_device
from motet.deploy.cell import Cell, StartEngine, start_cell
from motet.deploy.connection import allow_open_files, connection_limits
from motet.deploy.discover import ProbeSettings, read_files
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_models import GatewayModels, Tokenizers
from motet.deploy.listen import HttpServer, listening, port_of, url_of
from motet.deploy.server_plan import GatewayPlan, ServerPlan
from motet.deploy.shutdown import StopSignals, first_of
from motet.deploy.tls.certificates import Certificates
from motet.deploy.worker_list import WorkersFile
from motet.engine import WorkerState
from motet.engines.http import Client, server_client
from motet.engines.native.spawn import spawn_receiver
from motet.errors import StartupError
from motet.models.memory_file import remove_abandoned_folders
from motet.routing.router import Router
from motet.routing.text_router import TextRouter
from motet.routing.workers.fleet import Fleet
from motet.settings.server_config import ServerConfig, environment
from motet.text.formats import ModelFormats
from motet.text.rendering.render_process import end_renderings
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.tracing.sender import tracer_for
from motet.tracing.spans import NO_TRACES, Tracer
from motet.types import Role

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
M_ARENA_MAX = -8
"""Value from glibc's malloc.h."""

T = TypeVar("T")
W = TypeVar("W", covariant=True)
C = TypeVar("C", Cell, Gateway)


class Outcome(IntEnum):
    """The reason why a server ended; the value is the exit code of its process."""

    STOPPED = 0
    ENGINE_DIED = 70
    STOPPED_BEFORE_READY = 130


@dataclass(frozen=True)
class Serving(Generic[W]):
    """A server that accepts requests."""

    url: str
    app: FastAPI
    """The application, which can be mounted in another server."""
    service: Service
    workforce: W
    """The workers of the server: a `Cell` or a `Gateway`."""


@dataclass(frozen=True)
class HttpSide:
    """The socket for clients, and the certificates of its connections."""

    listener: socket.socket
    certificates: Certificates

    @property
    def url(self) -> str:
        return url_of(self.listener, scheme="http" if self.certificates.for_clients is None else "https")


async def run_server(
    plan: ServerPlan, *, start_engine: StartEngine, on_ready: Callable[[Serving[Cell]], None], signals: StopSignals
) -> Outcome:
    """Runs a server until a signal stops it or no engine is left to decode. Raises `StartupError`."""
    allow_open_files()
    remove_abandoned_folders()
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listening(plan.server))
        stack.enter_context(plan.certificates.reloaded_on_signal())
        config = replace(plan.server, port=port_of(listener))
        batches = await stack.enter_async_context(batch_store(config.batches))
        tokenizer = Tokenizer.load(plan.tokenizer_path, chat_template=plan.chat_template)
        formats = ModelFormats.of(tokenizer, ChatTemplate.of(tokenizer).source, names=plan.parsers)
        client = await stack.enter_async_context(server_client(tls=plan.certificates.for_workers))
        address = f"{config.host}:{config.port}"
        tracer = await stack.enter_async_context(tracer_of(config))
        start = start_cell(plan, address=address, start_engine=start_engine, client=client, tracer=tracer)
        cell = await started(start, signals)
        if cell is None:
            return Outcome.STOPPED_BEFORE_READY
        stack.push_async_callback(cell.close)
        router = cell.router
        name = config.served_model_name
        base = served_model(name, router, tokenizer=tokenizer, formats=formats, placed=router.placed())
        models = ModelWithAdapters(
            base,
            cards=router.fleet.catalog.models,
            engines_of=lambda adapter: (router.of(adapter), router.placed(adapter)),
        )
        service = Service(
            models,
            config,
            workers=router.fleet.reports,
            figures=cell.figures,
            control=cell.control,
            receiver=receiver_for(router.fleet),
            tokenizer_files=partial(read_files, plan.tokenizer_path),
            connect=cell.connect,
            takes_tickets=bool(plan.engine.cluster_key),
            block_events=cell.endpoint,
            batches=batches,
            tracer=tracer,
        )
        side = HttpSide(listener, plan.certificates)
        return await serve(service, cell, side=side, on_ready=on_ready, signals=signals, linger_s=plan.death_linger_s)


async def run_gateway(
    plan: GatewayPlan, *, on_ready: Callable[[Serving[Gateway]], None], signals: StopSignals
) -> Outcome:
    """Runs a gateway until a signal stops it. Raises `StartupError`."""
    allow_open_files()
    remove_abandoned_folders()
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listening(plan.server))
        stack.enter_context(plan.certificates.reloaded_on_signal())
        config = replace(plan.server, port=port_of(listener))
        batches = await stack.enter_async_context(batch_store(config.batches))
        client = await stack.enter_async_context(server_client(tls=plan.certificates.for_workers))
        tracer = await stack.enter_async_context(tracer_of(config))
        gateway, models = make_gateway(plan, client, tracer=tracer)
        stack.push_async_callback(gateway.close)
        names = await started(first_models(gateway, models, timeout_s=plan.gateway.start_timeout_s), signals)
        if names is None:
            return Outcome.STOPPED_BEFORE_READY
        service = Service(
            models,
            replace(config, served_model_name=names[0]),
            workers=gateway.router.fleet.reports,
            figures=gateway.router.figures,
            membership=Membership(gateway.join, gateway.leave, gateway.drain),
            control=gateway.control,
            receiver=receiver_for(gateway.router.fleet),
            tokenizer_files=models.tokenizer_files,
            batches=batches,
            tracer=tracer,
        )
        side = HttpSide(listener, plan.certificates)
        return await serve(service, gateway, side=side, on_ready=on_ready, signals=signals)


def receiver_for(fleet: Fleet) -> NcclReceiver:
    return NcclReceiver(lambda: cuda_device(fleet.reports()), start=spawn_receiver)


def tracer_of(config: ServerConfig) -> AbstractAsyncContextManager[Tracer]:
    """Returns a context with the tracer of this server. Raises ConfigError for invalid settings of OpenTelemetry."""
    name = f"{config.host}:{config.port}"
    return tracer_for(config.otlp_endpoint, name=name, environ=environment(), log_format=config.log_format)


def make_gateway(plan: GatewayPlan, client: Client, *, tracer: Tracer = NO_TRACES) -> tuple[Gateway, GatewayModels]:
    """Makes the gateway with the workers of the plan, and their models. Raises ConfigError."""
    probes = ProbeSettings(
        config=plan.gateway,
        client=client,
        worker_key=plan.server.worker_key,
        pass_keys=not (plan.server.api_keys or plan.server.admin_key),
        find_tokenizer=plan.find_tokenizer,
    )
    fleet = Fleet(session_expiry_s=plan.routing.session_expiry_s)
    router = Router(fleet, plan.routing, cell=plan.cell, tickets=probes.tickets, tracer=tracer)
    texts = TextRouter(fleet)
    name, tokenizers = plan.server.served_model_name, Tokenizers(plan.tokenizers)
    models = GatewayModels(router, tokenizers, texts=texts, first_name=name, defaults=plan.defaults)
    file = plan.gateway.workers_file
    gateway = Gateway(
        router,
        models.prepare,
        probes=probes,
        drain_s=plan.server.drain_timeout_s,
        heartbeat_s=plan.heartbeat_s,
        connects_workers=plan.connects_workers,
        texts=texts,
        listed=plan.listed or (WorkersFile(Path(file).expanduser(), period_s=plan.heartbeat_s) if file else None),
    )
    return gateway, models


async def first_models(gateway: Gateway, models: Models, *, timeout_s: float) -> list[str]:
    """Waits until a report of every worker has been requested and one can answer requests; returns the names of the
    models. Raises StartupError with the state of each worker."""
    fleet = gateway.router.fleet
    known = ", ".join(member.id for member in fleet.members) or "no worker is listed so far"
    logger.info("waiting at most %g s for a worker that answers: %s", timeout_s, known)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s), gateway.watched():
            while not _can_answer(fleet):
                await fleet.changes.wait()
    if not _can_answer(fleet):
        states = "".join(
            f"\n  {member.id} ({member.address}) is {member.state}: {member.note}" for member in fleet.members
        )
        raise StartupError(f"no worker could answer requests within {timeout_s:g} s{states or '; none was listed'}")
    return [*models()]


def _can_answer(fleet: Fleet) -> bool:
    decoding = any(member.facts.role is not Role.PREFILL for member in fleet.catalog.ready())
    return decoding or any(member.facts.takes_texts and member.state is WorkerState.READY for member in fleet.members)


async def started(start: Awaitable[T], signals: StopSignals) -> T | None:
    """Waits for the start and returns its result; None if a signal came first."""
    starting = asyncio.ensure_future(start)
    try:
        await first_of(asyncio.wait([starting]), signals.drain.wait())
        return starting.result() if starting.done() else None
    finally:
        starting.cancel()
        await asyncio.wait([starting])


async def serve(
    service: Service,
    workforce: C,
    *,
    side: HttpSide,
    on_ready: Callable[[Serving[C]], None],
    signals: StopSignals,
    linger_s: float = 0.0,
) -> Outcome:
    """Serves with these workers until a signal stops it or no engine is left to decode; then closes the workers."""
    serving = Serving(side.url, create_app(service), service, workforce)
    http = HttpServer(serving.app, connection_limits(service.config), certificates=side.certificates)
    async with contextlib.AsyncExitStack() as running, asyncio.TaskGroup() as tasks:
        await running.enter_async_context(batch_runner(service, serving.app))
        watching = tasks.create_task(workforce.watch())
        ended = tasks.create_task(http.serve(sockets=[side.listener]))
        on_ready(serving)
        await first_of(asyncio.wait([ended]), signals.drain.wait(), service.drain_requested.wait(), workforce.death())
        outcome = Outcome.STOPPED
        if not workforce.dead:
            service.start_drain()
            limit_s = service.config.drain_timeout_s
            await first_of(_end_pause(service), signals.at_once.wait(), timeout_s=limit_s)
            logger.info("stopping: running answers have %g s; a second signal stops at once", limit_s)
            await first_of(service.admission.empty(), signals.at_once.wait(), workforce.death(), timeout_s=limit_s)
        if workforce.dead:
            outcome = Outcome.ENGINE_DIED
            logger.error("no engine is left to decode; the server ends in %g s", linger_s)
            await first_of(signals.drain.wait(), timeout_s=linger_s)
        watching.cancel()
        await asyncio.wait([watching])  # else it would restart the engines that end now
        await running.aclose()
        # Before the connections: open answers end with an error event, and close their connections.
        await workforce.close()
        if service.receiver is not None:
            await service.receiver.close()
        end_renderings()
        http.stop(at_once=signals.at_once.is_set())
    return outcome


async def _end_pause(service: Service) -> None:
    """Ends a pause or a sleep before the server stops: groups that were kept would not end."""
    if (control := service.control) is None:
        return
    if control.sleep is None:
        await control.resume()
    elif service.admission.open:
        await control.sleep.let_groups_end()


def favour_streams() -> None:
    """Keeps the interpreter from delaying streams.

    All present objects are exempt from garbage collection, since a full collection would stop every stream for 30 to 60
    ms. Threads that run Python code release the interpreter's lock after 0.5 ms instead of 5 ms: the event loop
    releases it at each socket call, and then waits for it. All threads use one memory arena. Must be called in the
    event loop."""
    anyio.CancelScope()  # loads anyio's backend, which otherwise the first answer does, for 20 to 50 ms
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
    share_arena()


def share_arena() -> None:
    """Makes all threads allocate memory from one arena, if glibc is the C library. By default each thread can have an
    arena of its own, which keeps the memory of the thread's largest task: 50 MB more after some thousand grammars."""
    # Not on macOS, which has no `mallopt`, nor on Windows, where a process has no library of its own.
    with contextlib.suppress(AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
