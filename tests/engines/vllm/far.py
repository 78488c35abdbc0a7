"""A vLLM server that a test plays: it takes requests, says tokens and ends when it is told to."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from motet.engines.base import WorkerState
from motet.engines.fake import fake_info
from motet.engines.vllm.ask import Ask
from motet.engines.vllm.engine import VLLMEngine
from motet.engines.vllm.figures import PDFigures
from motet.engines.vllm.tickets import KVParams
from motet.engines.vllm.wire import Piece, Usage
from motet.engines.wire import EngineReport
from motet.errors import MotetError
from motet.types import EngineKind, Finish, FinishReason, TokenLogprob

REPORT = EngineReport(
    version="0",
    engine_id="far-2",
    state=WorkerState.READY,
    info=msgspec.structs.replace(fake_info(), kind=EngineKind.VLLM, ticket_readers=1),
)
LENGTH = Finish(FinishReason.LENGTH)


class Call:
    """One request, and the answer to it: what is said lies ready until it is read."""

    def __init__(self, ask: Ask, trace: str, session_id: str) -> None:
        self.ask, self.trace, self.session_id = ask, trace, session_id
        self.opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.taken = False
        """Whether who asked knows that it was taken."""
        self.closed = False
        """By who asked."""
        self.over = False
        """Ended from here."""
        self.reads = 0
        """That brought something."""
        self._items: deque[Piece | Usage] = deque()
        self._error: MotetError | None = None
        self._news = asyncio.Event()

    @property
    def open(self) -> bool:
        return self.opening.done() and not self.over and not self.closed

    def accept(self) -> None:
        if not self.opening.done():
            self.opening.set_result(None)

    def refuse(self, error: MotetError) -> None:
        self.over = True
        if not self.opening.done():
            self.opening.set_exception(error)

    def say(self, *items: Piece | Usage) -> None:
        self._items.extend(items)
        self._news.set()

    def end(self, error: MotetError | None = None) -> None:
        self.over, self._error = True, error
        self._news.set()

    async def read(self) -> list[Piece | Usage]:
        while not self._items and not self.over:
            self._news.clear()
            await self._news.wait()
        if not self._items and self._error is not None:
            raise self._error
        items = list(self._items)
        self._items.clear()
        self.reads += bool(items)
        return items

    def close(self) -> None:
        self.closed = True


class FarServer:
    """`VLLMServer`, as engines and groups ask it."""

    def __init__(self, *, accepting: bool = True) -> None:
        self.name = "the vLLM server http://far.test"
        self.accepting = accepting
        """Whether it takes requests at once; else `Call.accept` does."""
        self.calls: list[Call] = []
        self.prefills: list[Ask] = []
        self.prefilled: asyncio.Future[list[KVParams]] | None = None
        self.rejected: list[Mapping[str, object]] = []
        self.rejects = True
        """Whether it can still tell prefill that a ticket is not used."""
        self.rejecting: asyncio.Future[None] | None = None
        self.known_prompt: asyncio.Future[tuple[TokenLogprob | None, ...]] | None = None
        self.answer_report = REPORT

    async def open(self, ask: Ask, *, trace: str = "", session_id: str = "") -> Call:
        call = Call(ask, trace, session_id)
        self.calls.append(call)
        if self.accepting:
            call.accept()
        try:
            await call.opening
        except BaseException:
            call.closed = True
            raise
        call.taken = True
        return call

    async def prompt_logprobs(self, ask: Ask, *, trace: str = "") -> tuple[TokenLogprob | None, ...]:
        self.known_prompt = asyncio.get_running_loop().create_future()
        return await self.known_prompt

    async def report(self, *, timeout_s: float) -> EngineReport:
        return self.answer_report

    async def prefill(self, ask: Ask, *, trace: str = "", session_id: str = "") -> list[KVParams]:
        self.prefills.append(ask)
        self.prefilled = asyncio.get_running_loop().create_future()
        return await self.prefilled

    async def reject(self, params: Mapping[str, object], model: str) -> bool:
        self.rejected.append(params)
        await asyncio.sleep(0)
        if self.rejecting is not None:
            await self.rejecting
        return self.rejects


class Lateness:
    """The wait for a leader's first token, which ends when a test says so."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, seconds: float) -> None:
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    def pass_(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Scene:
    """An engine of such a server."""

    def __init__(self, *, accepting: bool = True) -> None:
        self.server = FarServer(accepting=accepting)
        self.figures = PDFigures()
        self.late = Lateness()
        self.engine = VLLMEngine(self.server, REPORT, figures=self.figures, leader_timeout_s=10.0, wait=self.late)

    @property
    def calls(self) -> list[Call]:
        return self.server.calls

    @property
    def open(self) -> list[int]:
        """Numbers of the calls whose connections are open."""
        return [number for number, call in enumerate(self.calls) if not call.closed and not call.over]


@asynccontextmanager
async def scene(*, accepting: bool = True) -> AsyncIterator[Scene]:
    """Afterwards nothing is under way."""
    before = asyncio.all_tasks()
    made = Scene(accepting=accepting)
    try:
        yield made
        await settle()
        made.engine.check()
    finally:
        await made.engine.close()
    await settle()
    assert asyncio.all_tasks() == before
    assert made.open == []


async def settle() -> None:
    """Lets everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def piece(child: int, *token_ids: int, finish: Finish | None = None) -> Piece:
    return Piece(child, token_ids, None, finish)
