"""The server of a gateway: one API process in front of workers that are servers elsewhere.

1. the socket is bound, the workers' file read: what can be wrong quickly is wrong at once
2. the first worker that answers requests is waited for, with all it takes to use it (its model's tokenizer, say)
3. the rest is `deploy.server`, which serves, drains and ends
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from motet.api.app import create_app
from motet.api.service import Service
from motet.config import CellConfig, GatewayConfig, RoutingConfig, ServerConfig
from motet.deploy.compose import make_router
from motet.deploy.discover import FoundServer
from motet.deploy.first_worker import first_models
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_models import GatewayModels
from motet.deploy.gateway_parts import GatewayRules, WorkerList
from motet.deploy.http import HttpServer
from motet.deploy.listen import listen, port_of, url_of
from motet.deploy.open_files import allow_open_files
from motet.deploy.remote_keeper import HEARTBEAT_S
from motet.deploy.server import Outcome, Server, started
from motet.deploy.serving import Serving
from motet.deploy.stop import StopSignals
from motet.deploy.tokenizers import TokenizerRules, Tokenizers
from motet.deploy.ways import Asking, FindTokenizer, ways_to_ask
from motet.deploy.workers_file import WorkersFile
from motet.engines.calls import server_client
from motet.engines.vllm.figures import PDFigures
from motet.routing.text_routed import TextRouted
from motet.settings.named_worker import NamedWorker

OnReady = Callable[[Serving[Gateway]], None]
"""Called once it serves."""


@dataclass(frozen=True)
class GatewayPlan:
    """All that makes up one gateway."""

    gateway: GatewayConfig
    server: ServerConfig
    """Its `served_model_name` may be empty: then models have their workers' names."""
    tokenizers: TokenizerRules = field(default=TokenizerRules({}))
    find_tokenizer: FindTokenizer | None = None
    """Of a model whose workers only say where it came from; None: that is not looked for."""
    routing: RoutingConfig = field(default=RoutingConfig())
    cell: CellConfig = field(default=CellConfig())
    """When prefill pays."""
    heartbeat_s: float = HEARTBEAT_S
    """Between two questions to a worker how it is."""
    introduces: bool = True
    """Whether workers that exchange KV are made to meet; False: they see to it themselves."""
    listed: WorkerList | None = None
    """Workers that come and go; None: those of the workers' file, if there is one."""


async def run_gateway(plan: GatewayPlan, *, on_ready: OnReady, signals: StopSignals) -> Outcome:
    """Runs a gateway until it is told to stop. Raises `StartupError`."""
    allow_open_files()
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(plan.server.host, plan.server.port))
        asking = Asking(
            config=plan.gateway,
            client=await stack.enter_async_context(server_client(ca_file=plan.gateway.worker_ca_file)),
            pass_keys=not (plan.server.api_keys or plan.server.admin_key),
            find_tokenizer=plan.find_tokenizer,
        )
        gateway, models = make_gateway(plan, asking)
        stack.push_async_callback(gateway.close)
        names = await started(first_models(gateway, models, timeout_s=plan.gateway.start_timeout_s), signals)
        if names is None:
            return Outcome.STOPPED_BEFORE_READY
        service = Service(
            models,
            msgspec.structs.replace(plan.server, port=port_of(listener), served_model_name=names[0]),
            workers=gateway.router.fleet,
            figures=gateway.router.figures,
            membership=gateway,
            tokenizer_files=models.tokenizer_files,
        )
        serving = Serving(url_of(listener), create_app(service), service, gateway)
        server = Server(service, gateway, HttpServer(serving.app, listener), signals)
        return await server.run(lambda: on_ready(serving))


def make_gateway(plan: GatewayPlan, asking: Asking) -> tuple[Gateway, GatewayModels]:
    """With the workers that the plan names, and what models they have. Raises ConfigError."""
    figures = PDFigures()
    router = make_router(plan.routing, plan.cell, pd_figures=figures)
    texts = TextRouted(router.fleet)
    models = GatewayModels(router, Tokenizers(plan.tokenizers), texts, first_name=plan.server.served_model_name)

    def server_at(named: NamedWorker) -> FoundServer:
        return FoundServer(named.url, ways_to_ask(named, asking, figures), named.kind)

    gateway = Gateway(
        router,
        models,
        plan.gateway,
        server_at=server_at,
        rules=GatewayRules(plan.server.drain_timeout_s, plan.heartbeat_s, plan.introduces),
        listed=plan.listed or _file_of(plan),
    )
    return gateway, models


def _file_of(plan: GatewayPlan) -> WorkerList | None:
    file = plan.gateway.workers_file
    return WorkersFile(Path(file).expanduser(), period_s=plan.heartbeat_s) if file else None
