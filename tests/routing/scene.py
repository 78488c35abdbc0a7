"""Fake workers of a router that die, leave and return, and what the readers of its groups received. Nothing here
runs by itself: an engine takes a step of a group when the group is read, and time passes only with `pass_time`.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec

from motet.block_names import block_names
from motet.engine import Engine, GroupStream, Worker, WorkerState
from motet.engine_info import EngineInfo
from motet.errors import EngineDiedError, MotetError, WorkerLeavingError
from motet.ids import ModelName, RequestId
from motet.metrics.stats import EngineStats
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.serving import WorkKind
from motet.routing.workers.worker_load import PromptBacklog
from motet.settings.server_config import CellConfig, Policy, RoutingConfig
from motet.testing.fake_engine import GONE, DuringPrefill, FakeEngine, FakeGroup, FakeLeases, Script, fake_info
from motet.tracing.spans import NO_TRACES, Tracer
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import (
    ChoiceStart,
    Finish,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    Role,
    SamplingParams,
    TokenLogprob,
    choice_starts,
)
from tests.clock import Clock, settle, turn

ONE_LIFE = RoutingConfig(migration_limit=0, migration_wait_s=0.0)
"""Routing without moves: a group ends when its worker is lost."""
LEAVING = WorkerLeavingError("it goes")
APART = ("prefill-0", "decode-0", "decode-1")
ANY_MODEL = ModelName("")
"""The model of groups that do not name one."""


def length(index: int) -> int:
    """Returns the number of tokens of a choice, including its end of sequence. No two choices of a small group end at
    the same step."""
    return 3 + 2 * index


def script(_: GenerateRequest, start: ChoiceStart) -> Sequence[int]:
    """Returns the tokens of a choice. Each depends on index, seed and position. A choice that is resumed with other
    tokens than these fails."""
    count = length(start.index) - 1
    tokens = [1 + (start.seed * 97 + start.index * 31 + position * 13) % 500 for position in range(count)] + [0]
    assert list(start.output_tokens) == tokens[: len(start.output_tokens)]
    return tokens


def group(
    name: str = "g",
    *,
    prompt_tokens: int = 200,
    n: int = 2,
    ticket: Ticket | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> GenerateRequest:
    """Returns a group. With 200 prompt tokens it goes to prefill, if there is a prefill worker. Each name has its own
    prompt."""
    first = 1 + crc32(name.encode()) % 10_000
    return GenerateRequest(
        request_id=RequestId(name),
        prompt=tuple(range(first, first + prompt_tokens)),
        choices=choice_starts(n, seed=7),
        sampling=SamplingParams(max_tokens=20, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        ticket=ticket,
        trace=f"trace-{name}",
    )


def answer(index: int) -> list[int]:
    """Returns the tokens of choice `index` of a `group`."""
    start = choice_starts(index + 1, seed=7)[index]
    return list(script(group(), start))[: group().sampling.max_tokens]


def answers(n: int) -> dict[int, list[int]]:
    return {index: answer(index) for index in range(n)}


def cache_prefix(fleet: Fleet, worker_id: str, request: GenerateRequest, tokens: int) -> None:
    """Notes that the worker has cached this number of tokens of the prompt, which must fill blocks."""
    size = fake_info().block_size
    assert tokens % size == 0
    fleet.cached_blocks.stored(worker_id, block_names(request.prompt[:tokens], size, salt=request.cache_salt))


class ControlledPrefill:
    """A prefill that sets `entered`, waits for `may_end`, and raises `error` if there is one."""

    def __init__(self, *, error: MotetError | None = None, held: bool = True) -> None:
        self.entered = asyncio.Event()
        self.may_end = asyncio.Event()
        self.error = error
        if not held:
            self.may_end.set()

    async def __call__(self, _: GenerateRequest) -> None:
        self.entered.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error


class SlowPrefill:
    """A prefill that takes a few turns of the event loop, and raises `error` if there is one."""

    def __init__(self, error: MotetError | None = None, *, turns: int = 3) -> None:
        self._error = error
        self._turns = turns

    async def __call__(self, _: GenerateRequest) -> None:
        await turn(self._turns)
        if self._error is not None:
            raise self._error


class ControlledEngine(FakeEngine):
    """Sets `submitted` when it gets a group. `generate` raises `refusal`, and a release waits for `may_release`. If
    `has_no_stats`, `stats` raises. If `has_defect`, the group "unlucky" raises an unexpected error."""

    def __init__(self, answers: Script, *, info: EngineInfo, leases: FakeLeases) -> None:
        super().__init__(answers, info=info, leases=leases)
        self.submitted = asyncio.Event()
        self.refusal: MotetError | None = None
        self.has_no_stats = False
        self.has_defect = False
        self.releasing = asyncio.Event()
        self.may_release = asyncio.Event()
        self.may_release.set()

    def generate(self, request: GenerateRequest) -> FakeGroup:
        self.submitted.set()
        if self.refusal is not None:
            raise self.refusal
        if self.has_defect and request.request_id == "unlucky":
            raise ZeroDivisionError
        return super().generate(request)

    async def stats(self) -> EngineStats:
        if self.has_no_stats:
            raise EngineDiedError("gone")
        return await super().stats()

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        self.releasing.set()
        await self.may_release.wait()
        await super().release(ticket, trace=trace)


def worker(
    name: str,
    *,
    info: EngineInfo | None = None,
    leases: FakeLeases | None = None,
    gate: asyncio.Semaphore | None = None,
    fail_after: dict[int, MotetError] | None = None,
    during_prefill: DuringPrefill | None = None,
) -> tuple[Worker, ControlledEngine]:
    """Returns a worker with a name such as `decode-1`, for a fleet that the test makes itself."""
    address = TransferAddress(f"engine-of-{name}", "127.0.0.1", 1)
    info = info or fake_info(role=Role(name.partition("-")[0]), transfer=address)
    engine = ControlledEngine(script, info=info, leases=leases or FakeLeases())
    engine.scenario.gate, engine.scenario.fail_after, engine.during_prefill = gate, fail_after or {}, during_prefill
    return Worker(name, engine, "127.0.0.1:1"), engine


class Tasks:
    """The tasks that the running loop starts from now on. At the end all of them must have ended.

    `asyncio.all_tasks` would go through every task that has not been garbage-collected.
    """

    def __init__(self) -> None:
        self._started: list[asyncio.Task[Any]] = []
        asyncio.get_running_loop().set_task_factory(self._start)

    def check(self) -> None:
        assert [task for task in self._started if not task.done()] == []

    def _start(
        self, loop: asyncio.AbstractEventLoop, what: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **more: Any
    ) -> asyncio.Task[Any]:
        self._started.append(asyncio.Task(what, loop=loop, **more))
        return self._started[-1]


@dataclass
class Received:
    """What the reader of one group received, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    finished: dict[int, Finish] = field(default_factory=dict)
    prompts: list[PromptReport] = field(default_factory=list)
    queue_s: float = field(default=0.0, compare=False)
    """Time for which the group waited for capacity, as it was reported."""

    def take(self, delta: GroupDelta, request: GenerateRequest) -> None:
        assert delta.request_id == request.request_id
        if delta.prompt is not None:
            self.queue_s = delta.prompt.queue_s
            # How the prompt was computed, and how long the group waited, differ between equal answers.
            self.prompts.append(msgspec.structs.replace(delta.prompt, prefill_worker="", queue_s=0.0))
        for choice in delta.choices:
            assert choice.index not in self.finished
            self.tokens.setdefault(choice.index, []).extend(choice.token_ids)
            self.logprobs.setdefault(choice.index, []).extend(choice.logprobs or ())
            if choice.finish is not None:
                self.finished[choice.index] = choice.finish

    async def read(self, stream: GroupStream, request: GenerateRequest) -> "Received":
        """Reads the stream to its end."""
        async for delta in stream:
            self.take(delta, request)
        return self

    def is_prefix_of(self, complete: "Received") -> bool:
        """Returns True if each choice of `complete` starts with what was received here."""
        return (
            all(complete.tokens[index][: len(got)] == got for index, got in self.tokens.items())
            and all(complete.logprobs[index][: len(got)] == got for index, got in self.logprobs.items())
            and all(complete.finished[index] == finish for index, finish in self.finished.items())
            and all(self.tokens[index] == complete.tokens[index] for index in self.finished)
            and self.prompts == complete.prompts[: len(self.prompts)]
        )


async def uninterrupted(request: GenerateRequest) -> Received:
    return await Received().read(FakeEngine(script).generate(request), request)


CREATED_SCENES: list["Scene"] = []
"""The scenes of the running test. `conftest` checks them at its end."""


class Scene:
    """A router over workers with names such as `decode-1`, each with capacity for `max_choices` choices and `blocks`
    blocks."""

    def __init__(
        self,
        *names: str,
        limit: int = 3,
        wait_s: float = 15.0,
        cell: CellConfig | None = None,
        policy: Policy = Policy.KV,
        spread_choices: int = 0,
        queue_timeout_s: float = 60.0,
        max_choices: int = 1024,
        blocks: int = 1024,
        role: Role = Role.BOTH,
        now_s: float = 100.0,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self.max_choices = max_choices
        self.blocks = blocks
        self.clock = Clock(now_s)
        self.leases = FakeLeases()
        self.fleet = Fleet(clock=self.clock)
        self.engines: dict[str, ControlledEngine] = {}
        """The engine of each worker's present start, by worker."""
        self.all: list[ControlledEngine] = []
        self.starts = Counter[str]()
        for name in names:
            self.start(name)
        routing = RoutingConfig(
            routing_policy=policy,
            migration_limit=limit,
            migration_wait_s=wait_s,
            spread_choices=spread_choices,
            queue_timeout_s=queue_timeout_s,
        )
        self.router = Router(self.fleet, routing, cell=cell, role=role, clock=self.clock, tracer=tracer)
        self.others: list[asyncio.Future[None]] = []
        """Other tasks of a test, which the test ends itself."""
        self.tasks = Tasks()
        CREATED_SCENES.append(self)

    def make_engine(self, name: str) -> ControlledEngine:
        start = sum(
            engine.info.transfer.engine_id.startswith(f"{name}, ") for engine in self.all if engine.info.transfer
        )
        address = TransferAddress(f"{name}, start {start}", "127.0.0.1", 1)
        info = fake_info(role=Role(name.partition("-")[0]), transfer=address)
        info = msgspec.structs.replace(info, max_num_seqs=self.max_choices, num_blocks=self.blocks)
        return ControlledEngine(script, info=info, leases=self.leases)

    def start(self, name: str) -> ControlledEngine:
        """Starts a worker, for the first time or again."""
        engine = self.engines[name] = self.make_engine(name)
        self.starts[name] += 1
        self.all.append(engine)
        self.fleet.put(Worker(name, engine, "127.0.0.1:1"))
        return engine

    def submit(self, name: str, n: int, *, priority: int = 0, client: str = "") -> "SubmittedGroup":
        """Submits a group of `n` choices to the router."""
        request = msgspec.structs.replace(group(name, n=n), priority=priority, client=client)
        return SubmittedGroup(request, self.router.generate(request))

    async def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.fleet.capacity.wake()
        await settle()

    def gate(self, steps: int) -> asyncio.Semaphore:
        """Lets all workers together take this number of steps, and one more each time that the gate is released."""
        gate = asyncio.Semaphore(steps)
        for engine in self.all:
            engine.scenario.gate = gate
        return gate

    def generating(self) -> list[str]:
        """Returns the workers that have an open group."""
        return [name for name, engine in self.engines.items() if engine.open]

    def generating_engine(self) -> ControlledEngine:
        (name,) = self.generating()
        return self.engines[name]

    def kill(self, name: str, error: EngineDiedError = GONE) -> None:
        """Kills an engine; the fleet does not know of it."""
        self.engines[name].die(error)

    def kill_all(self) -> None:
        for name in self.engines:
            self.kill(name)
            self.fleet.mark(name, WorkerState.DEAD)

    async def evict(self, name: str) -> None:
        """Ends the worker's drain time, so its groups must move."""
        self.fleet.mark(name, WorkerState.DRAINING)
        await self.fleet.evict(name, LEAVING)

    async def leave(self, name: str) -> None:
        await self.evict(name)
        self.fleet.remove(name)

    @property
    def requests(self) -> list[GenerateRequest]:
        """All groups that any engine got to generate, sorted by id. A move adds its number to the id."""
        return sorted((one for engine in self.all for one in engine.requests), key=lambda one: one.request_id)

    @property
    def started(self) -> list[str]:
        """The groups that started, in order. Only for scenes in which one worker generates."""
        return [one.request_id for engine in self.all for one in engine.requests]

    @property
    def prefills(self) -> list[str]:
        """The ids of the groups that were prefilled."""
        return [one.request_id for engine in self.all for one in engine.prefills]

    @property
    def released(self) -> list[Ticket]:
        """The tickets that were released."""
        return [ticket for engine in self.all for ticket in engine.released]

    @property
    def pulls(self) -> int:
        return sum(engine.record.pulls for engine in self.all)

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the workers have generated."""
        return sum(engine.record.generated_tokens for engine in self.all)

    @property
    def moves(self) -> dict[tuple[str, str], int]:
        """Number of moves by cause and outcome."""
        return dict(self.router.counts.migrations)

    @property
    def bypasses(self) -> dict[str, int]:
        """Number of bypasses by reason, without zeros."""
        return {reason: number for reason, number in self.router.counts.bypasses.items() if number}

    def expire_leases_of_removed_workers(self) -> None:
        """Ends the leases of removed workers: without another worker, their tickets could not be released."""
        here = [member.worker.engine for member in self.fleet.members if member.worker is not None]
        for engine in self.all:
            if engine not in here and engine.info.transfer is not None:
                self.leases.remove(engine.info.transfer.engine_id)

    def check(self) -> None:
        """Checks that nothing is open, held or running."""
        for engine in self.all:
            engine.check()
        self.router.check()
        self.tasks.check()


class SubmittedGroup:
    """A group that the router got, its stream, and the deltas that were read."""

    def __init__(self, request: GenerateRequest, stream: GroupStream) -> None:
        self.request = request
        self.stream = stream
        self.received = Received()

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.received.take(await anext(self.stream), self.request)

    async def read(self) -> Received:
        """Reads to the end, and then gives a group that waits for capacity the time to start."""
        await self.received.read(self.stream, self.request)
        await settle()
        return self.received

    async def leave(self) -> None:
        await self.stream.aclose()
        await settle()


async def tokens_of(stream: GroupStream) -> dict[int, list[int]]:
    """Reads to the end. Returns the tokens by choice."""
    tokens: dict[int, list[int]] = {}
    async for delta in stream:
        for choice in delta.choices:
            tokens.setdefault(choice.index, []).extend(choice.token_ids)
    return tokens


async def answers_of(engine: Engine, request: GenerateRequest) -> dict[int, list[int]]:
    return await tokens_of(engine.generate(request))


def backlog_of(scene: Scene, work: WorkKind) -> PromptBacklog:
    """Returns the backlog of the worker that would get a group now."""
    backlog = scene.router.dispatcher.chooser.backlog(work, group())
    assert backlog is not None
    return backlog


async def error_of(stream: GroupStream) -> MotetError | None:
    """Returns the error with which the stream ends."""
    try:
        async for _ in stream:
            pass
    except MotetError as error:
        return error
    return None


async def read(stream: GroupStream, request: GenerateRequest, received: Received) -> None:
    """Reads to the end, or to the error that ends the stream."""
    try:
        await received.read(stream, request)
    except MotetError:
        return
