"""Engine processes that have a fault at a named point of a group's progress, not after some time.

The point is checked at each request to an engine and at each of its results. After a deadly fault all later results of
the engine are dropped, as if the process had died before it sent them, so the point is exact.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from motet.engine import GroupStream
from motet.engine_orders import EngineOrder, OrderAnswer
from motet.engines.native.client import NativeEngine
from motet.engines.native.spawn import Spawn
from motet.errors import MotetError
from motet.settings.engine_config import EngineConfig
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta
from tests.patience import PATIENCE_S


class Moment(Enum):
    """The events at which a point is checked."""

    PREFILL_REQUESTED = auto()
    """The engine got a prompt to prefill for another one."""
    GRANTED = auto()
    """The engine returned the ticket."""
    SUBMITTED = auto()
    """The engine got the group to generate."""
    GENERATED = auto()
    """The engine sent the tokens of a step."""


@dataclass
class GroupProgress:
    """The progress of one group on one engine."""

    request: GenerateRequest
    moment: Moment = Moment.SUBMITTED
    generated: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each choice, including tokens that other engines generated."""
    max_at_once: int = 0
    """Maximum number of tokens of a choice in one step. Without a grammar, more than one means that drafts were
    accepted."""
    finished: set[int] = field(default_factory=set)

    def take(self, delta: GroupDelta) -> None:
        self.moment = Moment.GENERATED
        for choice in delta.choices:
            self.generated[choice.index] += len(choice.token_ids)
            self.max_at_once = max(self.max_at_once, len(choice.token_ids))
            if choice.finish is not None:
                self.finished.add(choice.index)


Point = Callable[[GroupProgress], bool]
FaultAction = Callable[["FaultyEngine"], None]


@dataclass
class PlannedFault:
    """A fault that happens once, to the engine that reaches the point first."""

    point: Point
    action: FaultAction
    happened: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no group waits for the fault any longer."""
    engine: "FaultyEngine | None" = None
    """The engine that has had the fault."""
    unfinished: int = 0
    """Number of unfinished choices of the group that reached the point."""


class FaultPlan:
    """The faults planned for the engines of one cell. They happen in the order in which they were armed."""

    def __init__(self) -> None:
        self._armed: list[PlannedFault] = []

    def arm(self, point: Point, action: FaultAction) -> PlannedFault:
        fault = PlannedFault(point, action)
        self._armed.append(fault)
        return fault

    def disarm(self) -> None:
        for fault in self._armed:
            fault.released.set()
        self._armed.clear()

    async def wait_for_others(self, progress: GroupProgress) -> None:
        """Waits for the next fault if the group has reached its point and other groups have not."""
        if self._armed and isinstance(point := self._armed[0].point, AllGenerated) and point.has_reached(progress):
            try:
                async with asyncio.timeout(PATIENCE_S / 2):  # shorter than the time limit of the client
                    await self._armed[0].released.wait()
            except TimeoutError:
                raise AssertionError(f"no other groups reached the point: {point}") from None

    def check(self, engine: "FaultyEngine", progress: GroupProgress) -> None:
        if self._armed and self._armed[0].point(progress):
            fault = self._armed.pop(0)
            fault.engine = engine
            fault.unfinished = len(progress.generated) - len(progress.finished)
            try:
                fault.action(engine)
                fault.happened.set()
            finally:
                fault.released.set()


class FaultyEngine(NativeEngine):
    """The real engine, which reports the progress of its groups to `faults`."""

    faults = FaultPlan()
    lost = False
    """True after a deadly fault: all later results of the engine are dropped."""
    killed_by: type[EngineOrder] | None = None
    """The order at which the process is killed."""
    leaving: asyncio.Task[None] | None = None
    """The task that evicts its groups."""

    def generate(self, request: GenerateRequest) -> "FaultyStream":  # type: ignore[override]  # a `GroupStream` too
        progress = GroupProgress(
            request, generated={start.index: len(start.output_tokens) for start in request.choices}
        )
        stream = FaultyStream(super().generate(request), self, progress)
        self.faults.check(self, progress)
        return stream

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        self.faults.check(self, GroupProgress(request, Moment.PREFILL_REQUESTED))
        ticket = await super().prefill(request, readers=readers)
        self.faults.check(self, GroupProgress(request, Moment.GRANTED))
        return ticket

    async def send(self, order: EngineOrder) -> OrderAnswer:
        if type(order) is self.killed_by:
            kill(self)
        return await super().send(order)

    def send_signal(self, number: signal.Signals, *, deadly: bool = True) -> None:
        assert self.info.pid is not None
        self.lost = self.lost or deadly
        os.kill(self.info.pid, number)
        if number is signal.SIGSTOP:  # the threads of the process continue for some time after the signal was sent
            os.waitid(os.P_PID, self.info.pid, os.WSTOPPED)

    async def end(self) -> MotetError:
        """Waits until the client knows that the engine is dead. Returns the error with which its groups end."""
        await self.died.wait()
        try:
            await self.stats()
        except MotetError as error:
            return error
        raise AssertionError("a dead engine answers")


class FaultyStream:
    """A `GroupStream` that reports each delta to the planned faults."""

    def __init__(self, inner: GroupStream, engine: FaultyEngine, progress: GroupProgress) -> None:
        self._inner = inner
        self._engine = engine
        self._progress = progress
        self._closed = False

    def __aiter__(self) -> "FaultyStream":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._engine.leaving is not None:
            # Otherwise the deltas that have already arrived could be taken for the complete group.
            await asyncio.wait([self._engine.leaving])
        await self._engine.faults.wait_for_others(self._progress)
        try:
            delta = await self._inner.__anext__()
            while self._engine.lost:
                delta = await self._inner.__anext__()
        except StopAsyncIteration:
            if self._engine.lost and not self._closed:
                raise await self._engine.end() from None
            raise
        self._progress.take(delta)
        self._engine.faults.check(self._engine, self._progress)
        return delta

    async def aclose(self) -> None:
        self._closed = True
        await self._inner.aclose()


async def start_faulty(config: EngineConfig, faults: FaultPlan, spawn: Spawn) -> FaultyEngine:
    """Starts an engine with these faults, in place of `NativeEngine.start`."""
    engine = await FaultyEngine.start(config, spawn=spawn)
    assert isinstance(engine, FaultyEngine)
    engine.faults = faults
    return engine


@contextmanager
def paused(*engines: FaultyEngine) -> Iterator[None]:
    """Stops the processes during the context, so that they finish no request before the test has sent all of them."""
    for engine in engines:
        engine.send_signal(signal.SIGSTOP, deadly=False)
    try:
        yield
    finally:
        for engine in engines:
            engine.send_signal(signal.SIGCONT, deadly=False)


def kill(engine: FaultyEngine) -> None:
    engine.send_signal(signal.SIGKILL)


def hang(engine: FaultyEngine) -> None:
    """Stops the process: it exists, but sends nothing."""
    engine.send_signal(signal.SIGSTOP)


def crash(engine: FaultyEngine) -> None:
    engine.send_signal(signal.SIGSEGV)


def abort(engine: FaultyEngine) -> None:
    engine.send_signal(signal.SIGABRT)


def prefilling(progress: GroupProgress) -> bool:
    """Returns True if a prefill engine has the prompt but has not returned a ticket."""
    return progress.moment is Moment.PREFILL_REQUESTED


def granted(progress: GroupProgress) -> bool:
    """Returns True if a prefill engine has returned its ticket, which no engine has used."""
    return progress.moment is Moment.GRANTED


def submitted(progress: GroupProgress) -> bool:
    """Returns True if the decode engine has the group, but has sent no token."""
    return progress.moment is Moment.SUBMITTED


def first_token(progress: GroupProgress) -> bool:
    return progress.moment is Moment.GENERATED


def generated(tokens: int) -> Point:
    """Returns the point at which some choice has at least this number of tokens."""
    return lambda progress: max(progress.generated.values(), default=0) >= tokens


class AllGenerated:
    """The point at which this number of groups has this number of tokens of each choice. A group that reaches it gets
    no more tokens before the fault, so that no group ends while another one is slow."""

    def __init__(self, groups: int, tokens: int) -> None:
        self._groups = groups
        self._tokens = tokens
        self._reached: set[str] = set()

    def __call__(self, progress: GroupProgress) -> bool:
        if progress.moment is Moment.GENERATED and min(progress.generated.values()) >= self._tokens:
            self._reached.add(progress.request.request_id)
        return len(self._reached) == self._groups

    def __str__(self) -> str:
        return f"{sorted(self._reached)} of {self._groups} groups have {self._tokens} tokens"

    def has_reached(self, progress: GroupProgress) -> bool:
        return progress.request.request_id in self._reached


def one_finished(progress: GroupProgress) -> bool:
    """Returns True if at least one choice has ended, and at least one has not."""
    return 0 < len(progress.finished) < len(progress.request.choices)


def one_token_left(progress: GroupProgress) -> bool:
    """Returns True if every unfinished choice can get only one more token."""
    max_tokens = progress.request.sampling.max_tokens
    left = [max_tokens - count for index, count in progress.generated.items() if index not in progress.finished]
    return progress.moment is Moment.GENERATED and bool(left) and max(left) == 1
