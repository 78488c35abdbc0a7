"""Engines in processes of their own that are struck at a named point of a group's course, not after some time.

Each time an engine is given something or gives something, the point is checked. After a deadly blow nothing that the
engine wrote comes through any more, as if the process had died before it sent it: so the point is exact.
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
from motet.settings.server_config import EngineConfig
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta


class Moment(Enum):
    """The events at which a point is checked."""

    ASKED = auto()
    """The engine was asked to prefill for another one."""
    GRANTED = auto()
    """The engine gave the ticket."""
    SUBMITTED = auto()
    """The engine was given the group to write."""
    WRITTEN = auto()
    """The engine gave the tokens of a step."""


@dataclass
class Course:
    """How far one group on one engine has come."""

    request: GenerateRequest
    moment: Moment = Moment.SUBMITTED
    written: dict[int, int] = field(default_factory=dict)
    """Tokens of each choice, with those that were written before the group came here."""
    most_at_once: int = 0
    """Most tokens of a choice in one step. Without a grammar, more than one means that drafts were right."""
    finished: set[int] = field(default_factory=set)

    def take(self, delta: GroupDelta) -> None:
        self.moment = Moment.WRITTEN
        for choice in delta.choices:
            self.written[choice.index] += len(choice.token_ids)
            self.most_at_once = max(self.most_at_once, len(choice.token_ids))
            if choice.finish is not None:
                self.finished.add(choice.index)


Point = Callable[[Course], bool]
Blow = Callable[["StruckEngine"], None]


@dataclass
class Strike:
    """A blow that falls once, on the engine that reaches the point first."""

    point: Point
    blow: Blow
    fallen: asyncio.Event = field(default_factory=asyncio.Event)
    on: "StruckEngine | None" = None
    """The engine that was struck."""
    unfinished: int = 0
    """Number of unfinished choices of the group that reached the point."""


class Strikes:
    """The strikes that the engines of one cell are to get, in order: each can fall only after the one before it."""

    def __init__(self) -> None:
        self._armed: list[Strike] = []

    def arm(self, point: Point, blow: Blow) -> Strike:
        strike = Strike(point, blow)
        self._armed.append(strike)
        return strike

    def disarm(self) -> None:
        self._armed.clear()

    def look(self, engine: "StruckEngine", course: Course) -> None:
        if self._armed and self._armed[0].point(course):
            strike = self._armed.pop(0)
            strike.on = engine
            strike.unfinished = len(course.written) - len(course.finished)
            strike.blow(engine)
            strike.fallen.set()


class StruckEngine(NativeEngine):
    """The real engine, which tells `strikes` what it does."""

    strikes = Strikes()
    lost = False
    """True once nothing may come from the engine any more."""
    killed_by: type[EngineOrder] | None = None
    """The order at which the process is killed."""
    leaving: asyncio.Task[None] | None = None
    """The task that tells its groups to go elsewhere."""

    def generate(self, request: GenerateRequest) -> "StruckStream":  # type: ignore[override]  # a `GroupStream` too
        course = Course(request, written={start.index: len(start.output_tokens) for start in request.choices})
        stream = StruckStream(super().generate(request), self, course)
        self.strikes.look(self, course)
        return stream

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        self.strikes.look(self, Course(request, Moment.ASKED))
        ticket = await super().prefill(request, readers=readers)
        self.strikes.look(self, Course(request, Moment.GRANTED))
        return ticket

    async def send(self, order: EngineOrder) -> OrderAnswer:
        if type(order) is self.killed_by:
            kill(self)
        return await super().send(order)

    def send_signal(self, number: signal.Signals, *, deadly: bool = True) -> None:
        assert self.info.pid is not None
        self.lost = self.lost or deadly
        os.kill(self.info.pid, number)
        if number is signal.SIGSTOP:  # the threads of the process run on for a while after the signal was sent
            os.waitid(os.P_PID, self.info.pid, os.WSTOPPED)

    async def end(self) -> MotetError:
        """Waits until the engine is known to be dead, and returns the error that its groups end with."""
        await self.died.wait()
        try:
            await self.stats()
        except MotetError as error:
            return error
        raise AssertionError("a dead engine answers")


class StruckStream:
    """A `GroupStream` that tells the strikes of each delta."""

    def __init__(self, inner: GroupStream, engine: StruckEngine, course: Course) -> None:
        self._inner = inner
        self._engine = engine
        self._course = course
        self._closed = False

    def __aiter__(self) -> "StruckStream":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._engine.leaving is not None:
            await asyncio.wait([self._engine.leaving])  # else what has already come might be taken for everything
        try:
            delta = await self._inner.__anext__()
            while self._engine.lost:
                delta = await self._inner.__anext__()
        except StopAsyncIteration:
            if self._engine.lost and not self._closed:
                raise await self._engine.end() from None
            raise
        self._course.take(delta)
        self._engine.strikes.look(self._engine, self._course)
        return delta

    async def aclose(self) -> None:
        self._closed = True
        await self._inner.aclose()


async def start_struck(config: EngineConfig, strikes: Strikes, spawn: Spawn) -> StruckEngine:
    """Takes the place of `NativeEngine.start`."""
    engine = await StruckEngine.start(config, spawn=spawn)
    assert isinstance(engine, StruckEngine)
    engine.strikes = strikes
    return engine


@contextmanager
def standing_still(*engines: StruckEngine) -> Iterator[None]:
    """What they are given meanwhile waits for them: no engine is quicker than the clients whom a test waits for."""
    for engine in engines:
        engine.send_signal(signal.SIGSTOP, deadly=False)
    try:
        yield
    finally:
        for engine in engines:
            engine.send_signal(signal.SIGCONT, deadly=False)


def kill(engine: StruckEngine) -> None:
    engine.send_signal(signal.SIGKILL)


def hang(engine: StruckEngine) -> None:
    """A stopped process is still there, but silent."""
    engine.send_signal(signal.SIGSTOP)


def crash(engine: StruckEngine) -> None:
    engine.send_signal(signal.SIGSEGV)


def abort(engine: StruckEngine) -> None:
    engine.send_signal(signal.SIGABRT)


def prefilling(course: Course) -> bool:
    """A prefill engine has the prompt but has not given a ticket yet."""
    return course.moment is Moment.ASKED


def granted(course: Course) -> bool:
    """A prefill engine has given its ticket, and nobody has used it yet."""
    return course.moment is Moment.GRANTED


def submitted(course: Course) -> bool:
    """The engine that is to write the group has it, but has given no token yet."""
    return course.moment is Moment.SUBMITTED


def first_token(course: Course) -> bool:
    return course.moment is Moment.WRITTEN


def written(tokens: int) -> Point:
    """Some choice has at least this many tokens."""
    return lambda course: max(course.written.values(), default=0) >= tokens


class AllWritten:
    """A point: so many groups have that many tokens of each choice."""

    def __init__(self, groups: int, tokens: int) -> None:
        self._groups = groups
        self._tokens = tokens
        self._there: set[str] = set()

    def __call__(self, course: Course) -> bool:
        if course.moment is Moment.WRITTEN and min(course.written.values()) >= self._tokens:
            self._there.add(course.request.request_id)
        return len(self._there) == self._groups


def one_finished(course: Course) -> bool:
    """At least one choice has ended, and at least one has not."""
    return 0 < len(course.finished) < len(course.request.choices)


def one_token_left(course: Course) -> bool:
    """Every choice that has not ended may write only one more token."""
    most = course.request.sampling.max_tokens
    left = [most - count for index, count in course.written.items() if index not in course.finished]
    return course.moment is Moment.WRITTEN and bool(left) and max(left) == 1
