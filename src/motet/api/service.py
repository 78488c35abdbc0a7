"""What the routes of one app share: the models, the workers, the settings, the limits, and the metrics.

All workers are asked at once how they are (`snapshot_workers`); one that does not answer delays nobody.

its keeper says       asked     shown as
ready, draining       yes       the same if it answers, else silent or dead; ready is draining where the server drains
silent                no        the same: it gave no sign of life for longer than we would wait here
starting, dead        no        the same, and without an engine, whatever engine it had before
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prometheus_client import ProcessCollector

from motet.api.http.admission import EVERYTHING, Admission, KeyLimits, Rights, rights_of
from motet.api.http.failure import above_maximum
from motet.api.known_groups import KnownGroups
from motet.api.served import Models, ServedModel, TextModel, model_named
from motet.api.trainers.incoming_weights import IncomingWeights
from motet.engine import (
    ANSWERING,
    PreparedWeights,
    SleepTag,
    WeightReceiver,
    WeightUpdate,
    WorkerReport,
    Workers,
    WorkerState,
)
from motet.errors import EngineError, EngineSilentError, NoSingleModelError, NotFoundError, RequestError
from motet.metrics.prometheus import Metrics
from motet.metrics.routing import RoutingFigures
from motet.metrics.stats import EngineStats
from motet.models.checkpoint import Checkpoint
from motet.settings.named_worker import NamedWorker
from motet.settings.server_config import ServerConfig
from motet.tracing.spans import NO_TRACES, Tracer
from motet.transfer.ticket import TransferAddress
from motet.types import EngineInfo, PauseMode


class Membership(Protocol):
    """How operators change which workers there are. Raises `NotFoundError` for an id that no worker has."""

    async def join(self, named: NamedWorker, id: str | None) -> str:
        """Adds a server as a worker, and returns its id once it is listed: as starting, until it has been reached.
        `id`: None for one that is made up. Raises `RequestError` for a URL or an id that is taken."""

    async def leave(self, id: str, drain_s: float) -> None:
        """The worker gets no new groups from now on. Returns at once; the worker is gone when its groups have ended, or
        after `drain_s`, and groups that have not ended by then go on elsewhere."""

    async def drain(self, id: str) -> None:
        """The worker gets no new groups from now on, and stays."""


class Weights(Protocol):
    """The weights of the engines that were started here (`deploy.weights`)."""

    @property
    def version(self) -> str: ...

    @property
    def paused(self) -> bool: ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns once nothing is computed; new groups wait."""
        ...

    async def abort(self, traces: Collection[str] | None) -> int:
        """Ends groups where they are: all, or those of these requests. Returns their number."""
        ...

    async def resume(self) -> None: ...

    async def update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        """Gives all engines new weights, or none, and owns the checkpoint from now on. Raises RequestError for weights
        that cannot be used, and EngineError if an engine is not there."""
        ...

    async def forget_prefixes(self, *, anew: bool) -> None:
        """Empties all prefix caches. Groups under way keep their KV, or compute it `anew`."""
        ...

    async def rename(self, version: str) -> None:
        """Calls the weights by another version."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of what the engines have in place of each tensor of a checkpoint. Raises EngineError
        unless all have the same."""
        ...

    async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
        """Does the first step of an update, for a gateway: the engines read new weights while the old ones serve."""
        ...

    async def apply_weights(self, version: str, *, digest: str = "") -> None:
        """Does the second step. Raises EngineError if nothing is prepared, or other weights than those of `digest`."""
        ...

    def drop_weights(self, digest: str = "") -> None:
        """Forgets what is prepared, unless it is something else than the weights of `digest`."""
        ...

    async def hold(self, held: bool) -> None:
        """Stops the engines between two steps, or lets them go on, for a gateway that pauses."""
        ...


class Sleep(Protocol):
    """The memory of the engines that were started here (`deploy.sleep`)."""

    @property
    def asleep(self) -> bool:
        """True while they compute nothing, whatever memory they have given back."""
        ...

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pauses; gives back the KV cache from level 1 on, and the weights at level 2. Raises RequestError if the
        engines cannot."""
        ...

    async def wake(self, tags: Collection[SleepTag]) -> bool:
        """Takes memory again: all, or only that of these tags. Returns True if all is there and groups go on. Raises
        EngineError if weights cannot be read again."""
        ...

    async def let_groups_end(self) -> None:
        """Wakes all before the server stops; never raises."""
        ...


Opened = TypeVar("Opened")

Connect = Callable[[TransferAddress], Awaitable[None]]
"""Raises MotetError if the two cannot meet."""


@dataclass
class Service:
    """One for each server. The engines belong to whoever started them; they are not closed here."""

    models: Models
    """The models that requests may name."""
    config: ServerConfig
    workers: Workers
    """The workers behind the models, looked up each time."""
    figures: Callable[[], RoutingFigures] = RoutingFigures
    """Returns the counts of routing."""
    membership: Membership | None = None
    """How workers join and leave; None: they are fixed."""
    weights: Weights | None = None
    """None if its engines are elsewhere."""
    sleep: Sleep | None = None
    """As `weights`."""
    receiver: WeightReceiver | None = None
    """What receives tensors over NCCL, if an engine runs on a GPU; None if nothing can."""
    tokenizer_files: Callable[[], dict[str, bytes]] | None = None
    """Returns the tokenizer's files for gateways that ask for them; may read from disk."""
    connect: Connect | None = None
    """Introduces the engine to another worker; None if it cannot."""
    takes_tickets: bool = False
    """True if clients may bring tickets to a decode server: a cluster key shows which ones workers of ours made."""
    block_events: Callable[[], str | None] = lambda: None
    """Returns the address where the engine's cached blocks are published, if anywhere."""
    draw_seed: Callable[[], int] = lambda: secrets.randbits(64)
    """Draws the seed of each prompt of a request that gave none. Equal prompts in one request have different ones."""
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer = NO_TRACES

    def __post_init__(self) -> None:
        config = self.config
        self.admission = Admission(config.max_waiting_groups)
        self.drain_asked = asyncio.Event()
        self.incoming = IncomingWeights()
        self.groups = KnownGroups(self.clock)
        self.key_limits = KeyLimits(max_requests=config.key_max_requests, max_choices=config.key_max_choices)
        self._rights = rights_of(config)
        self.metrics = Metrics(config.metric_prefix)
        ProcessCollector(registry=self.metrics.registry)

    @property
    def model_names(self) -> list[str]:
        return [*self.models()]

    def served(self, name: str | None) -> ServedModel:
        """Returns the model that a request names, or the only one. Raises what `model_named` raises, and `RequestError`
        for a model that takes texts: requests for one are passed on before they come here."""
        model = model_named(self.models(), name)
        if isinstance(model, TextModel):
            raise RequestError(
                f"The model `{model.name}` runs on a server that takes texts: /v1/chat/completions and /v1/completions "
                "are its only routes.",
                param="model",
                code="unsupported_model",
            )
        return model

    def only_model(self) -> ServedModel:
        """The model of this server when a gateway uses it as a worker. Raises NoSingleModelError."""
        match [*self.models().values()]:
            case [ServedModel() as model]:
                return model
        raise NoSingleModelError(
            f"This server has {', '.join(self.model_names) or 'no model'}; a worker is a server with one of its own. "
            "Name the servers behind it as workers instead."
        )

    def check_size(
        self, client: str, *, num_prompts: int, n: int, most: int, prompt_param: str, count_param: str = "n"
    ) -> None:
        """Raises if a request may not have this many prompts with `n` choices each (at most `most`), or would not be
        let in now. Called early, it saves reading prompts in vain. `prompt_param`, `count_param`: named in errors."""
        if n > most:
            flag = "--max-n" if most == self.config.max_n else "--max-num-seqs"
            raise above_maximum(count_param, n, most=most, flag=flag)
        total, config = num_prompts * n, self.config
        if total > config.max_choices:
            raise RequestError(
                f"Too many choices: {num_prompts} prompts x {n} = {total}, while one request may have at most "
                f"{config.max_choices} (--max-choices). Send fewer prompts at a time, or a smaller 'n'.",
                param=prompt_param,
                code="too_many_choices",
            )
        if num_prompts > config.max_waiting_groups:
            raise RequestError(
                f"Too many prompts: {num_prompts}, while at most {config.max_waiting_groups} may wait for their first "
                "token on this server (--max-waiting-groups), so they would never be taken in together. Send fewer at "
                "a time.",
                param=prompt_param,
                code="too_many_prompts",
            )
        self.admission.check_room(num_prompts, client=client)
        self.key_limits.check(client, total)

    def rights(self, client: str) -> Rights:
        """Returns what a client may ask for."""
        return self._rights.get(client, EVERYTHING)

    @property
    def only_worker(self) -> str:
        """The id of the worker, if there is just one; else empty."""
        reports = self.workers.reports()
        return reports[0].id if len(reports) == 1 else ""

    def opened(self, part: Opened | None) -> Opened:
        """Returns what a route of trainers is about. Raises NotFoundError unless these routes are open here."""
        if not self.config.rl:
            raise NotFoundError("This route is closed: start the server with --rl.", code="rl_off")
        if part is None:
            raise NotFoundError(
                "The engines of this server are elsewhere: ask their own servers.", code="no_engines_here"
            )
        return part

    def start_drain(self) -> None:
        """Takes no new groups from now on; those that run finish."""
        self.admission.draining = True
        self.drain_asked.set()


WITHOUT_ENGINE = (WorkerState.STARTING, WorkerState.DEAD)


@dataclass(frozen=True)
class WorkerSnapshot:
    """A worker as its keeper knows it, with what it answered itself."""

    report: WorkerReport
    state: WorkerState
    stats: EngineStats | None = None
    """Its figures, if it answered."""

    @property
    def info(self) -> EngineInfo | None:
        """The facts about its engine; None while it has none."""
        worker = self.report.worker
        return None if worker is None or self.state in WITHOUT_ENGINE else worker.engine.info

    @property
    def alive(self) -> bool:
        """True if it answered, or is merely slow."""
        return self.report.state in ANSWERING and self.state is not WorkerState.DEAD


async def snapshot_workers(
    reports: Iterable[WorkerReport], *, patience_s: float, draining: bool = False, local_only: bool = False
) -> list[WorkerSnapshot]:
    """Returns the workers in the order of `reports`. `draining`: the server drains. `local_only`: asks local ones."""

    async def seen(report: WorkerReport) -> WorkerSnapshot:
        worker, state = report.worker, report.state
        if draining and state is WorkerState.READY:
            state = WorkerState.DRAINING
        if worker is None or report.state not in ANSWERING or (local_only and not worker.local):
            return WorkerSnapshot(report, state)
        try:
            async with asyncio.timeout(patience_s):
                return WorkerSnapshot(report, state, await worker.engine.stats())
        except (TimeoutError, EngineError) as error:
            # It is in a long step, or stopped, or its server says so; an engine of ours that is silent has been killed.
            slow = isinstance(error, TimeoutError) or (isinstance(error, EngineSilentError) and not worker.local)
            return WorkerSnapshot(report, WorkerState.SILENT if slow else WorkerState.DEAD)

    return await asyncio.gather(*map(seen, reports))
