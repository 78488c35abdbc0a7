"""What the routes of one app share: the models, the workers, the settings, the limits, and the metrics.

`snapshot_workers` queries all workers at the same time, so a worker that does not answer delays no other. Which worker
is queried, and the state in its snapshot, depend on the state that its keeper reports:

reported              queried   state in the snapshot
ready, draining       yes       the same if it answers, else silent or dead; ready is draining if the server drains
silent                no        the same: it sent no heartbeat for longer than a query would wait
starting, dead        no        the same, and without an engine, even if it had one before
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from prometheus_client import ProcessCollector

from motet.api.batches.store import BatchStore
from motet.api.http.admission import (
    EVERYTHING,
    OTHER_CLIENTS,
    Admission,
    KeyLimits,
    Rights,
    rights_of,
)
from motet.api.http.failure import above_maximum
from motet.api.known_groups import KnownGroups
from motet.api.served import Models, ServedModel, TextModel, model_named
from motet.api.tensor_bodies import TensorMemory
from motet.control.adapters import NO_ADAPTERS
from motet.control.engine_control import EngineControl
from motet.control.nccl_receiver import NcclReceiver
from motet.engine import ANSWERING, WorkerReport, WorkerState
from motet.engine_info import EngineInfo
from motet.errors import (
    EngineError,
    EngineSilentError,
    ModelGoneError,
    NoSingleModelError,
    NotFoundError,
    PausedError,
    RequestError,
)
from motet.metrics.prometheus import Metrics
from motet.metrics.routing import RoutingFigures, with_client_names
from motet.metrics.stats import EngineStats
from motet.settings.named_worker import NamedWorker
from motet.settings.server_config import ServerConfig
from motet.tracing.spans import NO_TRACES, Tracer
from motet.transfer.ticket import TransferAddress
from motet.types import GenerateRequest


@dataclass(frozen=True)
class Membership:
    """Lets operators change the workers of a gateway. `leave` and `drain` raise NotFoundError for an unknown id."""

    join: Callable[[NamedWorker, str | None], Awaitable[str]]
    """Adds a server as a worker with an id; None to generate one. Returns the id as soon as the worker is listed: as
    starting, until it has been reached. Raises RequestError for a URL or an id that another worker has."""
    leave: Callable[[str, float], Awaitable[None]]
    """Gives a worker no new groups from now on, and returns at once. The worker is removed when its groups have ended,
    or after this number of seconds; groups that have not ended by then move to other workers."""
    drain: Callable[[str], Awaitable[None]]
    """Gives a worker no new groups from now on. The worker stays."""


Opened = TypeVar("Opened")

ConnectEngine = Callable[[TransferAddress], Awaitable[None]]
"""Connects the engine to another worker. Raises MotetError if they cannot connect."""


@dataclass
class Service:
    """The state that the routes of a server share. It does not own the engines, and does not close them."""

    models: Models
    config: ServerConfig
    workers: Callable[[], Sequence[WorkerReport]]
    """Returns the current workers of all models, in the order in which they joined."""
    figures: Callable[[], RoutingFigures] = RoutingFigures
    """Returns the counts of routing."""
    membership: Membership | None = None
    """Lets workers join and leave. None if the workers are fixed."""
    control: EngineControl | None = None
    """Weights, pauses and sleep of the engines; None if the server has none to control."""
    receiver: NcclReceiver | None = None
    """Receiver of tensors over NCCL; None if the server has none."""
    tokenizer_files: Callable[[], dict[str, bytes]] | None = None
    """Returns the tokenizer's files for gateways. Can read from disk."""
    connect: ConnectEngine | None = None
    """Connects the engine to another worker; None if it cannot."""
    takes_tickets: bool = False
    """True if clients may bring tickets to a decode server: a cluster key shows which tickets Motet's workers made."""
    block_events: Callable[[], str | None] = lambda: None
    """Returns the address at which the engine's cached blocks are published; None if they are not."""
    batches: BatchStore | None = None
    """Files and batches; None if the server has none."""
    draw_seed: Callable[[], int] = lambda: secrets.randbits(64)
    """Returns the seed of a prompt in a request without seed. Equal prompts in one request get different seeds."""
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer = NO_TRACES

    def __post_init__(self) -> None:
        config = self.config
        self.drain_requested = asyncio.Event()
        self.groups = KnownGroups(self.clock)
        self.key_limits = KeyLimits(
            max_requests=config.key_max_requests,
            max_choices=config.key_max_choices,
            max_answer_bytes=config.max_open_answer_bytes,
        )
        self._rights = rights_of(config)
        weights = {client: rights.client_weight for client, rights in self._rights.items()}
        self.admission = Admission(config.max_waiting_groups, weights=weights)
        self.metrics = Metrics(config.metric_prefix)
        ProcessCollector(registry=self.metrics.registry)

    @cached_property
    def tensor_memory(self) -> TensorMemory:
        """The memory for tensors of trainers and gateways."""

        def num_weights() -> int:
            engines = [] if self.control is None else self.control.engines.connected()
            return max((engine.info.num_weights for engine in engines), default=0)

        return TensorMemory(minimum_bytes=self.config.max_open_body_bytes, num_weights=num_weights)

    @property
    def model_names(self) -> list[str]:
        return [*self.models()]

    def served(self, name: str | None) -> ServedModel:
        """Returns the model that a request names, or the only one if the name is None or empty. Raises the errors of
        `model_named`, and RequestError for a model that takes texts: the routes that can serve it pass the request on
        without this call."""
        model = model_named(self.models(), name or None)
        if isinstance(model, TextModel):
            routes = "/v1/chat/completions and /v1/completions are its only routes"
            message = f"The model `{model.name}` runs on a server that takes texts: {routes}."
            raise RequestError(message, param="model", code="unsupported_model")
        return model

    def only_model(self) -> ServedModel:
        """Returns the base model of this server as the worker of a gateway. Raises NoSingleModelError."""
        match [model for model in self.models().values() if model.parent is None]:
            case [ServedModel() as model]:
                return model
        raise NoSingleModelError(
            f"This server has {', '.join(self.model_names) or 'no model'}; a worker is a server with one model of its "
            "own. Use the workers of this server instead."
        )

    def model_of(self, request: GenerateRequest) -> ServedModel:
        """Returns the model of a group that a gateway has placed on this server. Raises NoSingleModelError, and
        ModelGoneError if this server does not have the model any more."""
        base, name = self.only_model(), request.model
        if name in ("", base.info.model):
            return base
        model = self.models().get(name)
        if not isinstance(model, ServedModel) or model.parent != base.name:
            raise ModelGoneError(f"This worker does not have {name!r}.")
        return model

    def check_size(
        self, client: str, *, num_prompts: int, n: int, max_n: int, prompt_param: str, count_param: str = "n"
    ) -> None:
        """Raises if a request may not have `num_prompts` prompts with `n` choices each (maximum: `max_n`), or would not
        be admitted now. Routes call this before they read the prompts. Errors name `prompt_param` and `count_param`."""
        if n > max_n:
            flag = "--max-n" if max_n == self.config.max_n else "--max-num-seqs"
            raise above_maximum(count_param, n, maximum=max_n, flag=flag)
        config, total = self.config, num_prompts * n
        if total > config.max_choices:
            numbers = f"{num_prompts} prompts x {n} = {total}, while one request can have at most {config.max_choices}"
            advice = "(--max-choices). Send fewer prompts at a time, or a smaller 'n'."
            raise RequestError(f"Too many choices: {numbers} {advice}", param=prompt_param, code="too_many_choices")
        if num_prompts > config.max_waiting_groups:
            maximum = f"at most {config.max_waiting_groups} may wait for their first token on this server"
            advice = "(--max-waiting-groups), so they could never be admitted together. Send fewer at a time."
            message = f"Too many prompts: {num_prompts}, while {maximum} {advice}"
            raise RequestError(message, param=prompt_param, code="too_many_prompts")
        self.admission.check_capacity(num_prompts, client=client)
        self.key_limits.check(client, total)

    def rights(self, client: str) -> Rights:
        """Returns what a client is permitted to do."""
        return self._rights.get(client, EVERYTHING)

    def routing_figures(self) -> RoutingFigures:
        """Returns the counts of routing, by the names of the clients that have API keys."""
        names = {rights.client_id: client for client, rights in self._rights.items()}
        return with_client_names(self.figures(), names, other=OTHER_CLIENTS)

    @property
    def only_worker(self) -> str:
        """Id of the worker if there is only one; else empty."""
        reports = self.workers()
        return reports[0].id if len(reports) == 1 else ""

    def opened(self, part: Opened | None) -> Opened:
        """Returns the part that a route of trainers acts on. Raises NotFoundError if it is None, or without --rl."""
        if not self.config.rl:
            raise NotFoundError("This route is closed: start the server with --rl.", code="rl_off")
        if part is None:
            message = "The engines of this server are on other servers: use the routes of those servers."
            raise NotFoundError(message, code="no_engines_here")
        return part

    def adapter_control(self) -> EngineControl:
        """Returns the control of the engines. Raises NotFoundError if the server has none. Adapters need no --rl."""
        if self.control is None:
            raise NotFoundError(NO_ADAPTERS, code="no_adapters")
        return self.control

    def check_pause(self) -> None:
        """Raises PausedError in a pause in which new requests are refused."""
        if self.control is not None and self.control.engines.refuses_new:
            raise PausedError("The server is paused for a weight update and takes no new requests. Try again later.")

    def start_drain(self) -> None:
        """Takes no new groups from now on. Running groups finish."""
        self.admission.draining = True
        self.drain_requested.set()


WITHOUT_ENGINE = (WorkerState.STARTING, WorkerState.DEAD)


@dataclass(frozen=True)
class WorkerSnapshot:
    """The report of a worker's keeper, and the worker's own answer to a query."""

    report: WorkerReport
    state: WorkerState
    stats: EngineStats | None = None
    """Figures of the engine; None if the worker did not answer."""

    @property
    def info(self) -> EngineInfo | None:
        """Facts about the engine; None while the worker has none."""
        worker = self.report.worker
        return None if worker is None or self.state in WITHOUT_ENGINE else worker.engine.info

    @property
    def alive(self) -> bool:
        """True if the worker answered, or is only slow."""
        return self.report.state in ANSWERING and self.state is not WorkerState.DEAD


async def snapshot_workers(
    reports: Iterable[WorkerReport], *, patience_s: float, draining: bool = False, local_only: bool = False
) -> list[WorkerSnapshot]:
    """Returns the workers in the order of `reports`. `local_only`: True to query only the workers of this server."""

    async def snapshot(report: WorkerReport) -> WorkerSnapshot:
        worker, state = report.worker, report.state
        if draining and state is WorkerState.READY:
            state = WorkerState.DRAINING
        if worker is None or report.state not in ANSWERING or (local_only and not worker.local):
            return WorkerSnapshot(report, state)
        try:
            async with asyncio.timeout(patience_s):
                return WorkerSnapshot(report, state, await worker.engine.stats())
        except (TimeoutError, EngineError) as error:
            # A slow engine is in a long step, or stopped, or its server reports so. A silent local engine was killed.
            slow = isinstance(error, TimeoutError) or (isinstance(error, EngineSilentError) and not worker.local)
            return WorkerSnapshot(report, WorkerState.SILENT if slow else WorkerState.DEAD)

    return await asyncio.gather(*map(snapshot, reports))
