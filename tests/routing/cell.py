"""A cell of fake workers that share one book of leases, and what tests need to hold it still."""

import asyncio
from collections.abc import Sequence
from typing import TypedDict, Unpack

from motet.block_names import block_names
from motet.engines.base import Engine, GroupStream, Worker
from motet.engines.fake import DuringPrefill, FakeEngine, FakeGroup, Script, fake_info
from motet.engines.fake_leases import FakeLeases
from motet.errors import EngineDiedError, MotetError
from motet.ids import ModelName, RequestId
from motet.routing.bypass import BypassRules
from motet.routing.choose import Policy
from motet.routing.disaggregate import Disaggregated
from motet.routing.fleet import Fleet
from motet.routing.routed import Routed
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import ChoiceStart, EngineInfo, EngineStats, GenerateRequest, Role, SamplingParams, choice_starts

ANSWER_TOKENS = 3
ANY_MODEL = ModelName("")
"""Asked for by groups that name none."""


def script(_: GenerateRequest, start: ChoiceStart) -> Sequence[int]:
    """Choice i answers 10i+1, 10i+2 and the end of sequence."""
    return [10 * start.index + 1, 10 * start.index + 2, 0]


def answer(index: int) -> list[int]:
    return [10 * index + 1, 10 * index + 2, 0]


def group(
    name: str = "g",
    *,
    prompt_tokens: int = 200,
    n: int = 2,
    ticket: Ticket | None = None,
    prompt_logprobs: int | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt=tuple(range(1, prompt_tokens + 1)),
        choices=choice_starts(n, seed=7),
        sampling=SamplingParams(max_tokens=20, prompt_logprobs=prompt_logprobs),
        ticket=ticket,
        trace=f"trace-{name}",
    )


class Options(TypedDict, total=False):
    """What a fake engine can be told."""

    info: EngineInfo
    gate: asyncio.Semaphore | None
    fail_after: dict[int, MotetError] | None
    during_prefill: DuringPrefill | None
    leases: FakeLeases


def remember(fleet: Fleet, worker_id: str, request: GenerateRequest, tokens: int) -> None:
    """The worker is said to have so many tokens of the prompt: whole blocks."""
    size = fake_info().block_size
    assert tokens % size == 0
    fleet.index.stored(worker_id, block_names(request.prompt[:tokens], size, request.cache_salt))


class Hold:
    """What prefill does: says that it was entered, waits for `go`, and fails with `error` if there is one."""

    def __init__(self, *, error: MotetError | None = None, held: bool = True) -> None:
        self.entered = asyncio.Event()
        self.go = asyncio.Event()
        self.error = error
        if not held:
            self.go.set()

    async def __call__(self, _: GenerateRequest) -> None:
        self.entered.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error


class WatchedEngine(FakeEngine):
    """Says when it was given a group; `refusal` is raised by `generate` itself; a release waits for `may_release`; with
    `dead` it gives no figures."""

    def __init__(self, answers: Script, **options: Unpack[Options]) -> None:
        super().__init__(answers, **options)
        self.submitted = asyncio.Event()
        self.refusal: MotetError | None = None
        self.dead = False
        self.releasing = asyncio.Event()
        self.may_release = asyncio.Event()
        self.may_release.set()

    def generate(self, request: GenerateRequest) -> FakeGroup:
        self.submitted.set()
        if self.refusal is not None:
            raise self.refusal
        return super().generate(request)

    async def stats(self) -> EngineStats:
        if self.dead:
            raise EngineDiedError("gone")
        return await super().stats()

    async def release(self, ticket: Ticket) -> None:
        self.releasing.set()
        await self.may_release.wait()
        await super().release(ticket)


def worker(name: str, **options: Unpack[Options]) -> tuple[Worker, WatchedEngine]:
    role = Role(name.partition("-")[0])
    info = fake_info(role=role, transfer=TransferAddress(f"engine-of-{name}", "127.0.0.1", 1))
    options.setdefault("info", info)
    engine = WatchedEngine(script, **options)
    return Worker(name, engine, "127.0.0.1:1"), engine


class Cell:
    """One prefill and one decode worker behind a `Disaggregated`."""

    def __init__(
        self,
        *,
        during_prefill: DuringPrefill | None = None,
        gate: asyncio.Semaphore | None = None,
        fail_after: dict[int, MotetError] | None = None,
        rules: BypassRules | None = None,
        role: Role = Role.BOTH,
    ) -> None:
        self.leases = FakeLeases()
        prefill, self.prefill = worker("prefill-0", leases=self.leases, during_prefill=during_prefill)
        decode, self.decode = worker("decode-0", leases=self.leases, gate=gate, fail_after=fail_after)
        self.fleet = Fleet([prefill, decode])
        self.routed = Routed(self.fleet)
        self.engine = Disaggregated(self.routed, self.routed, rules or BypassRules(), role=role)
        self._tasks = Tasks()

    def check(self) -> None:
        """Nothing is open, kept or running."""
        self.prefill.check()
        self.decode.check()
        self.routed.check()
        self.engine.check()
        self._tasks.check()

    @property
    def bypasses(self) -> dict[str, int]:
        """Those that happened."""
        return {reason: number for reason, number in self.engine.bypasses.items() if number}


class Pair:
    """Two workers of one role."""

    def __init__(
        self,
        role: str = "prefill",
        *,
        first: Hold | None = None,
        second: Hold | None = None,
        policy: Policy = Policy.KV,
    ) -> None:
        self.leases = FakeLeases()
        self.now_s = 0.0
        one, self.first = worker(f"{role}-0", leases=self.leases, during_prefill=first)
        two, self.second = worker(f"{role}-1", leases=self.leases, during_prefill=second)
        self.fleet = Fleet([one, two], clock=lambda: self.now_s)
        self.engine = Routed(self.fleet, policy)
        self._tasks = Tasks()

    @property
    def prefills(self) -> tuple[int, int]:
        return len(self.first.prefills), len(self.second.prefills)

    @property
    def groups(self) -> tuple[int, int]:
        return len(self.first.requests), len(self.second.requests)

    def check(self) -> None:
        self.engine.check()
        self.first.check()
        self.second.check()
        self._tasks.check()


class Clock:
    """Stands still unless it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Tasks:
    """Those that ran when this was made: at the end of a test there must be no others."""

    def __init__(self) -> None:
        self._before = asyncio.all_tasks()

    def check(self) -> None:
        assert asyncio.all_tasks() - self._before == set()


async def tokens_of(stream: GroupStream) -> dict[int, list[int]]:
    """By choice, to the end of the stream."""
    tokens: dict[int, list[int]] = {}
    async for delta in stream:
        for choice in delta.choices:
            tokens.setdefault(choice.index, []).extend(choice.token_ids)
    return tokens


async def answers_of(engine: Engine, request: GenerateRequest) -> dict[int, list[int]]:
    return await tokens_of(engine.generate(request))
