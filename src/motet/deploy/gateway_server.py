"""The server of a gateway: one API process in front of workers that are servers elsewhere.

1. the socket is bound, the workers' file read: what can be wrong quickly is wrong at once
2. the first worker that decodes is waited for; from it come the model's name and the tokenizer, unless they are set
3. the rest is `deploy.server`, which serves, drains and ends
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from motet.api.app import create_app
from motet.api.served import OneModel
from motet.api.service import Service
from motet.config import CellConfig, GatewayConfig, RoutingConfig, ServerConfig
from motet.deploy.compose import make_router
from motet.deploy.first_worker import decoding_workers, fetch_tokenizer
from motet.deploy.gateway import Gateway
from motet.deploy.http import HttpServer
from motet.deploy.listen import listen, port_of, url_of
from motet.deploy.remote_keeper import HEARTBEAT_S, KeptServer
from motet.deploy.server import Outcome, Server, started
from motet.deploy.stop import StopSignals
from motet.deploy.tokenizer_files import load_files, read_files
from motet.engines.remote import EngineServer, RemoteEngine, engine_client
from motet.text.tokenizer import Tokenizer

ServerAt = Callable[[str], EngineServer]
OnReady = Callable[[str, str, Gateway], None]
"""Called with the server's URL and its model once it serves."""


@dataclass(frozen=True)
class GatewayPlan:
    """All that makes up one gateway."""

    gateway: GatewayConfig
    server: ServerConfig
    """Its `served_model_name` may be empty: then it is the workers'."""
    tokenizer_path: Path | None = None
    """None: the workers' own."""
    chat_template: str | None = None
    """Jinja text in place of the model's own."""
    routing: RoutingConfig = field(default=RoutingConfig())
    cell: CellConfig = field(default=CellConfig())
    """When prefill pays."""
    heartbeat_s: float = HEARTBEAT_S
    """Between two questions to a worker how it is."""


async def run_gateway(plan: GatewayPlan, *, on_ready: OnReady, signals: StopSignals) -> Outcome:
    """Runs a gateway until it is told to stop. Raises `StartupError`."""
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(plan.server.host, plan.server.port))
        client = await stack.enter_async_context(engine_client())

        def server_at(url: str) -> EngineServer:
            return EngineServer(url, client, api_key=plan.gateway.worker_api_key)

        gateway = make_gateway(plan, server_at)
        stack.push_async_callback(gateway.close)
        beginnings = await started(_begin(plan, gateway, server_at), signals)
        if beginnings is None:
            return Outcome.STOPPED_BEFORE_READY
        config = msgspec.structs.replace(
            plan.server,
            port=port_of(listener),
            served_model_name=plan.server.served_model_name or beginnings.model,
        )
        service = Service(
            OneModel.of(config.served_model_name, gateway.router.engine, beginnings.tokenizer),
            config,
            workers=gateway.router.fleet,
            figures=gateway.router.figures,
            membership=gateway,
            tokenizer_files=lambda: beginnings.files,
        )
        server = Server(service, gateway, HttpServer(create_app(service), listener), signals)
        return await server.run(lambda: on_ready(url_of(listener), config.served_model_name, gateway))


def make_gateway(plan: GatewayPlan, server_at: ServerAt) -> Gateway:
    """With the workers that the plan names. Raises ConfigError."""

    def kept(url: str) -> KeptServer:
        server = server_at(url)
        return KeptServer(url, server.report, lambda report: RemoteEngine(server, report))

    return Gateway(
        make_router(plan.routing, plan.cell),
        plan.gateway,
        server_at=kept,
        drain_s=plan.server.drain_timeout_s,
        heartbeat_s=plan.heartbeat_s,
    )


@dataclass(frozen=True)
class Beginnings:
    """What the first workers have told."""

    model: str
    tokenizer: Tokenizer
    files: dict[str, bytes]
    """That it is made of."""


async def _begin(plan: GatewayPlan, gateway: Gateway, server_at: ServerAt) -> Beginnings:
    first, *others = await decoding_workers(gateway, timeout_s=plan.gateway.start_timeout_s)
    if plan.tokenizer_path is None:
        files = await fetch_tokenizer([first, *others], server_at=server_at)
    else:
        files = await asyncio.to_thread(read_files, plan.tokenizer_path)
    tokenizer = await asyncio.to_thread(load_files, files, chat_template=plan.chat_template)
    return Beginnings(first.engine.info.model, tokenizer, files)
