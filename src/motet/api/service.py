"""What the routes of one app share: the models, the settings, who may come in, and the metrics."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

from motet.api.admission import Admission
from motet.api.key_limits import KeyLimits
from motet.api.membership import Membership
from motet.api.served import Models, ServedModel, TextModel, model_named
from motet.api.workers import OnlyWorker
from motet.config import ServerConfig
from motet.engines.base import Worker, Workers
from motet.errors import NoSingleModelError, RequestError
from motet.metrics.prometheus import Metrics
from motet.metrics.routing import RoutingFigures
from motet.transfer.ticket import TransferAddress

Connect = Callable[[TransferAddress], Awaitable[None]]
"""Raises MotetError if the two cannot meet."""


def draw_seed() -> int:
    """The seed of a request that gave none: 64 random bits."""
    return secrets.randbits(64)


class Service:
    """Built once a server. The engines belong to whoever started them; they are not closed here."""

    def __init__(  # sizes: what one server is made of
        self,
        models: Models,
        config: ServerConfig,
        *,
        workers: Workers | None = None,
        figures: Callable[[], RoutingFigures] = RoutingFigures,
        membership: Membership | None = None,
        tokenizer_files: Callable[[], dict[str, bytes]] | None = None,
        connect: Connect | None = None,
        block_events: Callable[[], str | None] = lambda: None,
        draw_seed: Callable[[], int] = draw_seed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`models`: what requests may name. `workers`: those behind them, asked each time; None: it is the only model's
        engine. `figures`: what routing has counted. `membership`: how workers join and leave; None: they are fixed.
        `tokenizer_files`: for gateways that ask for them; may read from disk. `connect`: how the engine meets another
        worker, if it can. `block_events`: where it is told which blocks the engine has cached, if anywhere."""
        self.models = models
        if workers is None:
            engine = self.only_model().engine
            workers = OnlyWorker(Worker("engine-0", engine, f"{config.host}:{config.port}"))
        self.workers = workers
        self.figures = figures
        self.membership = membership
        self.tokenizer_files = tokenizer_files
        self.connect = connect
        self.block_events = block_events
        self.config = config
        self.admission = Admission(config.max_waiting_groups)
        self.drain_asked = asyncio.Event()
        self.key_limits = KeyLimits(max_requests=config.key_max_requests, max_choices=config.key_max_choices)
        self.metrics = Metrics()
        self.draw_seed = draw_seed
        self.clock = clock

    @property
    def model_names(self) -> list[str]:
        return [model.name for model in self.models.all()]

    def served(self, name: str | None) -> ServedModel:
        """The model that a request names, or leaves out where there is only one. Raises what `model_named` raises, and
        `RequestError` for one that is asked in texts: such requests are passed on before they come here."""
        model = model_named(self.models, name)
        if isinstance(model, TextModel):
            raise RequestError(
                f"The model `{model.name}` runs on a server that takes texts: /v1/chat/completions and /v1/completions "
                "are all it can be asked through.",
                param="model",
                code="unsupported_model",
            )
        return model

    def only_model(self) -> ServedModel:
        """What this server is to a gateway that uses it as a worker. Raises NoSingleModelError."""
        models = self.models.all()
        model = models[0] if len(models) == 1 else None
        if not isinstance(model, ServedModel):
            raise NoSingleModelError(
                f"This server has {', '.join(self.model_names) or 'no model'}; a worker is a server with one of its "
                "own. Name the servers behind it as workers instead."
            )
        return model

    def check_room(self, client: str, *, num_groups: int, num_choices: int) -> None:
        """Raises if such a request would not be let in now: asked early, it saves reading a prompt in vain."""
        self.admission.check_room(num_groups)
        self.key_limits.check(client, num_choices)

    @property
    def only_worker(self) -> str:
        """The id of the worker, if there is just one."""
        reports = self.workers.reports()
        return reports[0].id if len(reports) == 1 else ""

    def start_drain(self) -> None:
        """No new groups from now on; those that run finish."""
        self.admission.draining = True
        self.drain_asked.set()

    async def drained(self) -> None:
        """Returns once no group is open."""
        await self.admission.empty()
