"""Fake workers that die, leave and return behind everything that places groups, and what a reader got of it all.

Nothing here runs by itself: an engine takes a step of a group when the group is read.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from motet.engines.base import GroupStream, Worker, WorkerState
from motet.engines.fake import GONE, FakeEngine, fake_info
from motet.engines.fake_leases import FakeLeases
from motet.errors import EngineDiedError, MotetError, WorkerLeavingError
from motet.routing.bypass import BypassRules
from motet.routing.disaggregate import Disaggregated
from motet.routing.fleet import Fleet
from motet.routing.migrate import Migrating
from motet.routing.moves import MigrationRules
from motet.routing.routed import Routed
from motet.transfer.ticket import TransferAddress
from motet.types import (
    ChoiceStart,
    Finish,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    Role,
    TokenLogprob,
)
from tests.routing.cell import Clock, Tasks, group

LEAVING = WorkerLeavingError("it goes")


def length(index: int) -> int:
    """Tokens of a choice with its end: no two of a small group end together."""
    return 3 + 2 * index


def script(_: GenerateRequest, start: ChoiceStart) -> Sequence[int]:
    """Every token depends on index, seed and place; who resumes with other tokens than these is told so."""
    count = length(start.index) - 1
    tokens = [1 + (start.seed * 97 + start.index * 31 + place * 13) % 500 for place in range(count)] + [0]
    assert list(start.written) == tokens[: len(start.written)]
    return tokens


def wish(
    name: str = "g", *, n: int = 3, logprobs: int | None = None, prompt_logprobs: int | None = None
) -> GenerateRequest:
    """With 200 prompt tokens, which are for prefill if there is one."""
    request = group(name, n=n, prompt_logprobs=prompt_logprobs)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, logprobs=logprobs))


@dataclass
class Heard:
    """What the reader of one group got, choice by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    finished: dict[int, Finish] = field(default_factory=dict)
    prompts: list[PromptReport] = field(default_factory=list)

    def take(self, delta: GroupDelta, request: GenerateRequest) -> None:
        assert delta.request_id == request.request_id
        if delta.prompt is not None:
            self.prompts.append(msgspec.structs.replace(delta.prompt, worker=""))
        for choice in delta.choices:
            assert choice.index not in self.finished
            self.tokens.setdefault(choice.index, []).extend(choice.token_ids)
            self.logprobs.setdefault(choice.index, []).extend(choice.logprobs or ())
            if choice.finish is not None:
                self.finished[choice.index] = choice.finish

    async def read(self, stream: GroupStream, request: GenerateRequest) -> "Heard":
        """To the end."""
        async for delta in stream:
            self.take(delta, request)
        return self

    def begins(self, whole: "Heard") -> bool:
        """Whether `whole` goes on from here, choice by choice."""
        return (
            all(whole.tokens[index][: len(got)] == got for index, got in self.tokens.items())
            and all(whole.logprobs[index][: len(got)] == got for index, got in self.logprobs.items())
            and all(whole.finished[index] == finish for index, finish in self.finished.items())
            and all(self.tokens[index] == whole.tokens[index] for index in self.finished)
            and self.prompts == whole.prompts[: len(self.prompts)]
        )


async def undisturbed(request: GenerateRequest) -> Heard:
    return await Heard().read(FakeEngine(script).generate(request), request)


class Scene:
    """Workers by name, such as `decode-1`, behind `Migrating(Disaggregated(Routed(fleet)))`."""

    def __init__(self, *names: str, limit: int = 3, wait_s: float = 15.0, rules: BypassRules | None = None) -> None:
        self.clock = Clock()
        self.leases = FakeLeases()
        self.fleet = Fleet(clock=self.clock)
        self.engines: dict[str, FakeEngine] = {}
        """Those of the present lives."""
        self.all: list[FakeEngine] = []
        for name in names:
            self.start(name)
        self.routed = Routed(self.fleet)
        self.apart = Disaggregated(self.routed, self.routed, rules or BypassRules())
        self.engine = Migrating(
            self.apart,
            MigrationRules(limit, wait_s),
            changed=self.fleet.changed,
            hopeful=self.fleet.hopeful,
            clock=self.clock,
        )
        self._tasks = Tasks()

    def start(self, name: str) -> FakeEngine:
        """For the first time or again."""
        address = TransferAddress(f"{name}, life {len(self.all)}", "127.0.0.1", 1)
        info = fake_info(role=Role(name.partition("-")[0]), transfer=address)
        self.engines[name] = FakeEngine(script, info=info, leases=self.leases)
        self.all.append(self.engines[name])
        self.fleet.put(Worker(name, self.engines[name], "127.0.0.1:1"))
        return self.engines[name]

    def writers(self) -> list[str]:
        """Who has an open group."""
        return [name for name, engine in self.engines.items() if engine.open]

    def writer(self) -> FakeEngine:
        (name,) = self.writers()
        return self.engines[name]

    def kill(self, name: str, error: EngineDiedError = GONE) -> None:
        """Nobody tells the fleet."""
        self.engines[name].die(error)

    def kill_all(self) -> None:
        for name in self.engines:
            self.kill(name)
            self.fleet.mark(name, WorkerState.DEAD)

    async def evict(self, name: str) -> None:
        self.fleet.mark(name, WorkerState.DRAINING)
        await self.fleet.evict(name, LEAVING)

    @property
    def asked(self) -> list[GenerateRequest]:
        """Every group that any engine was given to write, by name: life by life."""
        return sorted((one for engine in self.all for one in engine.requests), key=lambda one: one.request_id)

    def check(self) -> None:
        """Nothing is open, kept or running."""
        for engine in self.all:
            engine.check()
        self.routed.check()
        self.apart.check()
        self.engine.check()
        self._tasks.check()


async def settle() -> None:
    """Lets everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def error_of(stream: GroupStream) -> MotetError | None:
    """What it ends with."""
    try:
        async for _ in stream:
            pass
    except MotetError as error:
        return error
    return None
