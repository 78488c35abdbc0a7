"""What the routes of one app share: the engine, the text layer, the settings, who may come in, and the metrics."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

from motet.api.admission import Admission
from motet.api.key_limits import KeyLimits
from motet.api.membership import Membership
from motet.api.workers import OnlyWorker
from motet.config import ServerConfig
from motet.engines.base import Engine, Worker, Workers
from motet.errors import ModelNotFoundError
from motet.metrics.prometheus import Metrics
from motet.metrics.routing import RoutingFigures
from motet.text.prepare import Preparer
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
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
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
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
        """`engine`: what requests go to. `workers`: those behind it, asked each time; None: it is the only one.
        `figures`: what routing has counted. `membership`: how workers join and leave; None: they are fixed.
        `tokenizer_files`: for gateways that ask for them; may read from disk. `connect`: how the engine meets another
        worker, if it can. `block_events`: where it is told which blocks the engine has cached, if anywhere."""
        self.engine = engine
        if workers is None:
            workers = OnlyWorker(Worker("engine-0", engine, f"{config.host}:{config.port}"))
        self.workers = workers
        self.figures = figures
        self.membership = membership
        self.tokenizer_files = tokenizer_files
        self.connect = connect
        self.block_events = block_events
        self.tokenizer = tokenizer
        self.template = template
        self.config = config
        self.admission = Admission(config.max_waiting_groups)
        self.drain_asked = asyncio.Event()
        self.key_limits = KeyLimits(max_requests=config.key_max_requests, max_choices=config.key_max_choices)
        self.metrics = Metrics(config.served_model_name)
        self.created = int(time.time())
        self.draw_seed = draw_seed
        self.clock = clock

    @property
    def model(self) -> str:
        return self.config.served_model_name

    @property
    def preparer(self) -> Preparer:
        """With the limits of the workers there are now; asked on the event loop, used anywhere."""
        return Preparer(self.tokenizer, self.template, self.engine.info)

    @property
    def max_group(self) -> int:
        """Choices one prompt may have."""
        return min(self.config.max_n, self.engine.info.max_num_seqs)

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out: there is only one."""
        if name is not None and name != self.model:
            raise ModelNotFoundError(
                f"The model `{name}` does not exist or you do not have access to it.", param="model"
            )

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
