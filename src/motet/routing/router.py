"""The engine behind a server's routes: groups come, wait for room, are written by workers of a fleet, and end.

    generate ──► is there room?  ──no──► the queue ──► `Journey.begin`, in a fair order
                     └─yes─► `Journey.begin`: prefill or not, in how many parts, on which workers (`dispatch`)
    place ───────────────────► `Journey.begin`: the gateway that sent the group has queued it, and moves it

A group of this server stands in three places and no more: here, by its name; in the books of the worker that writes it;
and in that worker's engine.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial

import msgspec

from motet.engine import GroupStream
from motet.errors import EngineClosedError, EngineDiedError, NoWorkerError
from motet.ids import ModelName, RequestId
from motet.metrics.routing import RoutingFigures, TicketLog
from motet.metrics.stats import EngineStats, total_stats
from motet.routing.choosing.cost import WorkKind
from motet.routing.groups.dispatch import Dispatcher
from motet.routing.groups.journey import Journey
from motet.routing.groups.migration import Moves
from motet.routing.queue.waiting import LOOK_AGAIN_S, WaitingGroups
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.settings.server_config import CellConfig, RoutingConfig
from motet.tracing.spans import NO_TRACES, Tracer
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, GenerateRequest, Role

NO_NAME = ModelName("")
"""The model of groups that name none: they go to the only model."""


def make_router(
    routing: RoutingConfig,
    cell: CellConfig,
    *,
    role: Role = Role.BOTH,
    tickets: TicketLog | None = None,
    clock: Callable[[], float] = time.monotonic,
    tracer: Tracer = NO_TRACES,
) -> "Router":
    """Returns the router that a server's settings ask for, over a fleet without workers yet."""
    fleet = Fleet(clock=clock, session_expiry_s=routing.session_expiry_s)
    return Router(fleet, routing, cell=cell, role=role, tickets=tickets, clock=clock, tracer=tracer)


class Router:
    """An `Engine` over the workers of a fleet; closing it closes every worker. The fleet may have one worker or a
    thousand, with or without prefill workers, and may change at any time."""

    def __init__(
        self,
        fleet: Fleet,
        routing: RoutingConfig | None = None,
        *,
        cell: CellConfig | None = None,
        role: Role = Role.BOTH,
        tickets: TicketLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        """`role`: the server's role for its clients. `tickets`: counts of tickets made by engines that are not ours."""
        self.fleet = fleet
        self.role = role
        self.counts = figures = RoutingFigures()
        self._routing = routing = routing or RoutingConfig()
        self._cell = cell or CellConfig()
        self.dispatcher = Dispatcher(fleet, figures, routing=routing, cell=self._cell, tickets=tickets, tracer=tracer)
        on_the_way = self.dispatcher.choices_on_the_way
        self.waiting = WaitingGroups(fleet, figures, routing=routing, on_the_way=on_the_way, clock=clock)
        self._whole = self.of(NO_NAME)
        self._tickets = tickets
        self._clock = clock
        self._groups: dict[RequestId, Journey] = {}
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        """The limits that every worker that writes choices can keep; while none is up, the last ones."""
        return self._whole.info

    def of(self, model: ModelName) -> "ModelView":
        """Returns one of the models of the fleet as an engine of its own."""
        return ModelView(self, model, generate=self.generate)

    def placed(self, model: ModelName = NO_NAME) -> "ModelView":
        """Returns an engine for groups that a gateway has given to this server: see `place`."""
        return ModelView(self, model, generate=self.place)

    def generate(self, request: GenerateRequest) -> GroupStream:
        """Begins or queues a group. Raises NoWorkerError if no worker is up, and what the worker's engine raises."""
        journey = self._journey(request, wait_s=self._routing.migration_wait_s)
        may_pass = self._closed or self.waiting.may_pass(request)
        if may_pass:
            journey.begin()
            self.waiting.passed(0.0)
        self._groups[request.request_id] = journey
        if not may_pass:
            self.waiting.push(journey)
        return journey

    def place(self, request: GenerateRequest) -> GroupStream:
        """As `generate`, for a group from a gateway, which has queued it and moves it to another server: it does not
        wait in the queue, and moves inside this server only if another worker takes it at once."""
        journey = self._journey(request, wait_s=0.0)
        journey.begin()
        self._groups[request.request_id] = journey
        return journey

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        return await self.dispatcher.prefill(request, readers=readers)

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        await self.dispatcher.release(ticket, trace)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if journey := self._groups.get(request_id):
            await journey.stop(index)
            if self.waiting:
                self.fleet.notify_room()  # a group that waits may fit now

    async def stats(self) -> EngineStats:
        return await self._whole.stats()

    async def close(self) -> None:
        """Closes all. Groups that wait for room, for prefill or for a worker end with EngineClosedError, all others
        with the error of their engine as it closes."""
        self._closed = True
        await self.waiting.close()
        closed = EngineClosedError("the engine was closed")
        await asyncio.gather(*(journey.abandon(closed) for journey in list(self._groups.values())))
        await self.dispatcher.settle()
        workers = [member.worker for member in self.fleet.members if member.worker is not None]
        await asyncio.gather(*(worker.engine.close() for worker in workers))

    async def cut(self, traces: Collection[str] | None = None) -> int:
        """Ends groups where they are, also those that wait; returns their number. `traces`: only those of these
        requests of clients, by their `x-request-id`."""
        journeys = [one for one in self._groups.values() if traces is None or one.request.trace in traces]
        await asyncio.gather(*(journey.cut() for journey in journeys))
        return len(journeys)

    async def rest(self) -> None:
        """Returns once no group that has begun is left."""
        while any(not journey.waits for journey in self._groups.values()):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self.fleet.room()

    def figures(self) -> RoutingFigures:
        """Returns the counts of routing."""
        figures = deepcopy(self.counts)
        figures.queued = len(self.waiting)
        figures.queued_choices = sum(journey.num_choices for journey in self._groups.values() if journey.waits)
        figures.choices = {member.id: member.books.open_choices for member in self.fleet.members}
        if not (self._cell.prefill_may_come or self.fleet.serving().has_prefill or any(figures.bypasses.values())):
            figures.bypasses = {}
        if self._tickets is not None:
            figures.pull_fallbacks = dict(self._tickets.pull_fallbacks)
            figures.tickets_unused = dict(self._tickets.tickets_unused)
        return figures

    def check(self) -> None:
        """Raises unless every group has ended and the books are empty."""
        if self._groups:
            raise AssertionError(f"groups left open: {sorted(self._groups)}")
        self.waiting.check()
        self.dispatcher.check()

    def _journey(self, request: GenerateRequest, *, wait_s: float) -> Journey:
        limit = self._routing.migration_limit
        moves = partial(Moves, self.counts, limit=limit, wait_s=wait_s, clock=self._clock)
        return Journey(request, self.dispatcher, moves=moves, now_s=self._clock(), ended=self._ended)

    def _ended(self, journey: Journey) -> None:
        """Forgets a group of which nothing is left, unless another one of its name has taken its place."""
        self.waiting.remove(journey)
        if self._groups.get(journey.request.request_id) is journey:
            del self._groups[journey.request.request_id]
            if not self._groups:
                self.fleet.notify_room()  # somebody may wait for the rest


class ModelView:
    """An `Engine`: a router as seen by requests for one model. Without a name it is the only model."""

    def __init__(self, router: Router, model: ModelName, *, generate: Callable[[GenerateRequest], GroupStream]) -> None:
        """`generate`: the router's method that begins groups of this view."""
        self._router = router
        self._model = model
        self._generate = generate
        self._seen: tuple[Member, ...] = ()
        """The members for which `info` was computed."""
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        """The limits that every worker that serves the model can keep; while none is up, the last ones. Raises
        NoWorkerError if none ever was up."""
        members = self._router.fleet.ready(WorkKind.GENERATE, self._model)
        if members is not self._seen:
            self._seen = members
            infos = [info for member in members if (info := member.info_of(self._model)) is not None]
            if infos:
                info, role = common_info(infos), self._router.role
                self._info = info if info.role is role else msgspec.structs.replace(info, role=role, transfer=None)
        if self._info is None:
            raise self._none_up()
        return self._info

    def generate(self, request: GenerateRequest) -> GroupStream:
        return self._generate(self._named(request))

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        return await self._router.prefill(self._named(request), readers=readers)

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        await self._router.release(ticket, trace=trace)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        await self._router.stop_choice(request_id, index)

    async def stats(self) -> EngineStats:
        """Returns the figures of all workers that serve the model and answer. Raises NoWorkerError if none does."""
        members = self._router.fleet.ready(WorkKind.GENERATE, self._model)
        answers = await asyncio.gather(*map(self._stats_of, members))
        alive = [stats for stats in answers if stats is not None]
        if not alive:
            raise self._none_up()
        return total_stats(alive)

    async def close(self) -> None:
        await self._router.close()

    async def _stats_of(self, member: Member) -> EngineStats | None:
        """Returns None if the worker does not answer."""
        if member.worker is None:
            return None
        try:
            return await member.worker.engine.stats()
        except (EngineDiedError, EngineClosedError) as error:
            self._router.dispatcher.failed(member, member.worker, error=error)
            return None

    def _named(self, request: GenerateRequest) -> GenerateRequest:
        return msgspec.structs.replace(request, model=self._model) if self._model else request

    def _none_up(self) -> NoWorkerError:
        if self._model:
            return NoWorkerError(f"no worker serves {self._model} now")
        return self._router.dispatcher.none_up(WorkKind.GENERATE)


MIXED = "mixed"
"""The fingerprint of a group of workers that differ: two of them may write different tokens; and the version of their
weights, if they have several."""


def common_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Returns the limits that each of these workers can keep. A group runs on one of them, so the smallest room counts;
    facts that some do not report are taken from the others."""
    first = infos[0]
    if len(infos) == 1:
        return first
    smallest = min(infos, key=lambda info: info.num_blocks * info.block_size)
    return msgspec.structs.replace(
        first,
        max_model_len=min(info.max_model_len for info in infos),
        block_size=smallest.block_size,
        num_blocks=smallest.num_blocks,
        bytes_per_block=smallest.bytes_per_block,
        vocab_size=min(info.vocab_size for info in infos),
        eos_token_ids=next((info.eos_token_ids for info in infos if info.eos_token_ids), ()),
        max_num_seqs=min(info.max_num_seqs for info in infos),
        fingerprint=first.fingerprint if len({info.fingerprint for info in infos}) == 1 else MIXED,
        model_digest=first.model_digest if len({info.model_digest for info in infos}) == 1 else "",
        weight_version=first.weight_version if len({info.weight_version for info in infos}) == 1 else MIXED,
        pid=None,
        transfer=None,
    )
