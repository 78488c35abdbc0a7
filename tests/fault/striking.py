"""Engines in processes of their own that are struck at a named point of a group's course, and not after a while.

A point is looked at whenever an engine is given something or gives something. From a deadly blow on, nothing that the
engine wrote comes through any more, as if the process had not lived to send it: so the point is exact.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from motet.config import EngineConfig
from motet.engines.base import GroupStream
from motet.engines.native.client import NativeEngine
from motet.engines.native.spawn import Spawn
from motet.errors import MotetError
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta


class Moment(Enum):
    """When a point is looked at."""

    ASKED = auto()
    """The engine has been asked to prefill for another one."""
    GRANTED = auto()
    """It has given the ticket."""
    SUBMITTED = auto()
    """It has been given the group to write."""
    WRITTEN = auto()
    """It has given what a step added."""


@dataclass
class Course:
    """One group on one engine, as far as it has come."""

    request: GenerateRequest
    moment: Moment = Moment.SUBMITTED
    written: dict[int, int] = field(default_factory=dict)
    """Tokens of each choice, with those of former lives."""
    finished: set[int] = field(default_factory=set)

    def take(self, delta: GroupDelta) -> None:
        self.moment = Moment.WRITTEN
        for choice in delta.choices:
            self.written[choice.index] += len(choice.token_ids)
            if choice.finish is not None:
                self.finished.add(choice.index)


Point = Callable[[Course], bool]
Blow = Callable[["StruckEngine"], None]


@dataclass
class Strike:
    """Falls once, on the engine where the point is reached first."""

    point: Point
    blow: Blow
    fallen: asyncio.Event = field(default_factory=asyncio.Event)
    on: "StruckEngine | None" = None
    """Whom it fell on."""
    unfinished: int = 0
    """Choices of the group that reached the point."""


class Strikes:
    """Those that the engines of one cell are to expect, one after the other."""

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
    """The real one; `strikes` are told what it does."""

    strikes = Strikes()
    lost = False
    """Whether nothing comes from it any more."""
    leaving: asyncio.Task[None] | None = None
    """Tells its groups to go."""

    def generate(self, request: GenerateRequest) -> "StruckStream":  # type: ignore[override]  # a `GroupStream` too
        course = Course(request, written={start.index: len(start.written) for start in request.choices})
        stream = StruckStream(super().generate(request), self, course)
        self.strikes.look(self, course)
        return stream

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        self.strikes.look(self, Course(request, Moment.ASKED))
        ticket = await super().prefill(request, readers=readers)
        self.strikes.look(self, Course(request, Moment.GRANTED))
        return ticket

    def send(self, number: signal.Signals, *, deadly: bool = True) -> None:
        assert self.info.pid is not None
        self.lost = self.lost or deadly
        os.kill(self.info.pid, number)
        if number is signal.SIGSTOP:  # its threads go on for a while after the signal was sent
            os.waitid(os.P_PID, self.info.pid, os.WSTOPPED)

    async def end(self) -> MotetError:
        """What its groups end with, once it is known to be dead."""
        await self.died.wait()
        try:
            await self.stats()
        except MotetError as error:
            return error
        raise AssertionError("a dead engine answers")


class StruckStream:
    """A `GroupStream`."""

    def __init__(self, inner: GroupStream, engine: StruckEngine, course: Course) -> None:
        self._inner = inner
        self._engine = engine
        self._course = course
        self._closed = False

    def __aiter__(self) -> "StruckStream":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._engine.leaving is not None:
            await asyncio.wait([self._engine.leaving])  # or what has come already might be all
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
    """Stands for `NativeEngine.start`."""
    engine = await StruckEngine.start(config, spawn=spawn)
    assert isinstance(engine, StruckEngine)
    engine.strikes = strikes
    return engine


@contextmanager
def standing_still(*engines: StruckEngine) -> Iterator[None]:
    """What they are given meanwhile waits for them: no engine is quicker than the clients whom a test waits for."""
    for engine in engines:
        engine.send(signal.SIGSTOP, deadly=False)
    try:
        yield
    finally:
        for engine in engines:
            engine.send(signal.SIGCONT, deadly=False)


def kill(engine: StruckEngine) -> None:
    engine.send(signal.SIGKILL)


def hang(engine: StruckEngine) -> None:
    """Stopped: it is there, and silent."""
    engine.send(signal.SIGSTOP)


def crash(engine: StruckEngine) -> None:
    engine.send(signal.SIGSEGV)


def abort(engine: StruckEngine) -> None:
    engine.send(signal.SIGABRT)


def prefilling(course: Course) -> bool:
    """A prefill engine has the prompt, and not given a ticket."""
    return course.moment is Moment.ASKED


def granted(course: Course) -> bool:
    """A prefill engine has given its ticket; nobody has used it."""
    return course.moment is Moment.GRANTED


def submitted(course: Course) -> bool:
    """The engine that writes has the group, and has given nothing."""
    return course.moment is Moment.SUBMITTED


def first_token(course: Course) -> bool:
    return course.moment is Moment.WRITTEN


def written(tokens: int) -> Point:
    """So many of some choice."""
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
    """One choice has come to its end, and others have not."""
    return 0 < len(course.finished) < len(course.request.choices)


def one_token_left(course: Course) -> bool:
    """Every choice that has not ended lacks one token of as many as it may have."""
    most = course.request.sampling.max_tokens
    left = [most - count for index, count in course.written.items() if index not in course.finished]
    return course.moment is Moment.WRITTEN and bool(left) and max(left) == 1
