"""vLLM servers whose answers a test scripts, groups for them, and their tickets."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from motet.engine import GroupStream, WorkerState
from motet.engine_info import EngineKind
from motet.engines.http import server_client
from motet.engines.vllm.requests import KVParams, VLLMRequest, ticket_from
from motet.engines.vllm.vllm_engine import VLLMEngine
from motet.engines.vllm.vllm_server import ScoredReply, VLLMAnswer, VLLMServer
from motet.engines.vllm.vllm_wire import VLLMPiece, VLLMUsage
from motet.engines.wire import EngineReport
from motet.errors import MotetError
from motet.ids import ModelName, RequestId
from motet.metrics.routing import TicketLog
from motet.testing.fake_engine import fake_info
from motet.transfer.ticket import Ticket
from motet.types import ChoiceStart, Finish, FinishReason, GenerateRequest, SamplingParams, choice_starts
from tests.clock import settle
from tests.patience import PATIENCE_S

PROMPT = (5, 6, 7, 8)
PARAMS: dict[str, object] = {"do_remote_prefill": True, "remote_request_id": "cmpl-1", "remote_block_ids": [[1, 2]]}
SAMPLING = SamplingParams(max_tokens=50, temperature=0.5)
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)


def ticket(name: str = "cmpl-1") -> Ticket:
    return ticket_from({**PARAMS, "remote_request_id": name}, engine_id="far-1", prompt=PROMPT)


def group(
    name: str = "g",
    *,
    n: int = 3,
    choices: tuple[ChoiceStart, ...] | None = None,
    sampling: SamplingParams = SAMPLING,
    ticket: Ticket | None = None,
    seeded: bool = False,
    stops: bool = False,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt=PROMPT,
        choices=choices or choice_starts(n, seed=7),
        sampling=sampling,
        cache_salt="salt",
        priority=3,
        ticket=ticket,
        trace=f"trace-{name}",
        session_id="session-1",
        model=ModelName("m"),
        seeded=seeded,
        stops=stops,
    )


REPORT = EngineReport(
    version="0",
    engine_id="far-2",
    state=WorkerState.READY,
    info=msgspec.structs.replace(fake_info(), kind=EngineKind.VLLM, ticket_readers=1),
)
LENGTH = Finish(FinishReason.LENGTH)


class Call(VLLMAnswer):
    """One request, and the answer to it, which waits until it is read."""

    def __init__(self, request: VLLMRequest) -> None:
        self.request = request
        self.opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.taken = False
        """True once the engine knows that the server has taken the request."""
        self.closed = False
        """True once the engine has closed it."""
        self.over = False
        """True once the test has ended it."""
        self.reads = 0
        """Number of reads that returned something."""
        self._items: deque[VLLMPiece | VLLMUsage] = deque()
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

    def say(self, *items: VLLMPiece | VLLMUsage) -> None:
        self._items.extend(items)
        self._news.set()

    def end(self, error: MotetError | None = None) -> None:
        self.over, self._error = True, error
        self._news.set()

    async def read(self) -> list[VLLMPiece | VLLMUsage]:
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


class ScriptedVLLM(VLLMServer):
    """A `VLLMServer` without a connection. The test answers its calls."""

    def __init__(self, *, accepting: bool = True) -> None:
        self.name = "the vLLM server http://far.test"
        self.accepting = accepting
        """True if the server takes requests at once; otherwise `Call.accept` does."""
        self.calls: list[Call] = []
        self.prefills: list[VLLMRequest] = []
        self.prefilled: asyncio.Future[list[KVParams]] | None = None
        self.rejected: list[Mapping[str, object]] = []
        self.reject_names: list[str] = []
        self.rejects = True
        """True if the prefill server can be notified that a ticket is not used."""
        self.rejecting: asyncio.Future[None] | None = None
        self.scored_request: VLLMRequest | None = None
        self.scored_answer: asyncio.Future[ScoredReply] | None = None
        self.answer_report = REPORT

    async def open(self, request: VLLMRequest) -> Call:
        call = Call(request)
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

    async def scored(self, request: VLLMRequest) -> ScoredReply:
        self.scored_request = request
        self.scored_answer = asyncio.get_running_loop().create_future()
        return await self.scored_answer

    async def report(self, *, timeout_s: float = 1.0) -> EngineReport:
        return self.answer_report

    async def prefill(self, request: VLLMRequest) -> list[KVParams]:
        self.prefills.append(request)
        self.prefilled = asyncio.get_running_loop().create_future()
        return await self.prefilled

    async def reject(self, params: Mapping[str, object], model: str, *, trace: str = "") -> bool:
        self.reject_names.append(trace)
        self.rejected.append(params)
        await asyncio.sleep(0)
        if self.rejecting is not None:
            await self.rejecting
        return self.rejects


class LeaderWait:
    """The wait for a leader's first token, which the test ends."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, seconds: float) -> None:
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    def time_out(self) -> None:
        """Ends the wait, as if the leader were late."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class VLLMScene:
    """The engine of a fake server."""

    def __init__(self, *, accepting: bool = True) -> None:
        self.server = ScriptedVLLM(accepting=accepting)
        self.figures = TicketLog()
        self.leader_wait = wait = LeaderWait()
        self.engine = VLLMEngine(self.server, REPORT, tickets=self.figures, leader_timeout_s=10.0, wait=wait)

    @property
    def calls(self) -> list[Call]:
        return self.server.calls

    @property
    def open(self) -> list[int]:
        """Numbers of the calls whose connections are open."""
        return [number for number, call in enumerate(self.calls) if not call.closed and not call.over]


@asynccontextmanager
async def vllm_scene(*, accepting: bool = True) -> AsyncIterator[VLLMScene]:
    """Makes a scene, and checks at the end that nothing is in progress."""
    before = asyncio.all_tasks()
    made = VLLMScene(accepting=accepting)
    try:
        yield made
        await settle()
        made.engine.check()
    finally:
        await made.engine.close()
    await settle()
    assert asyncio.all_tasks() == before
    assert made.open == []


@asynccontextmanager
async def scene_with_group(
    request: GenerateRequest, *, accepting: bool = True, leaves: bool = False
) -> AsyncIterator[tuple[VLLMScene, GroupStream]]:
    """Makes a scene in which a group has been sent. `leaves`: its reader leaves at the end."""
    async with vllm_scene(accepting=accepting) as there:
        stream = there.engine.generate(request)
        await settle()
        yield there, stream
        if leaves:
            await stream.aclose()


def piece(child: int, *token_ids: int, finish: Finish | None = None) -> VLLMPiece:
    return VLLMPiece(child, token_ids, None, finish)


@dataclass
class CannedVLLM:
    """A server with fixed answers. `answers`: status and body of each path; other paths give 404."""

    answers: dict[str, tuple[int, bytes]]
    url: str = ""
    requests: list[tuple[str, Mapping[str, str], bytes]] = field(default_factory=list)
    """Path, headers and body of each request."""

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, request.headers.copy(), await request.read()))
        status, body = self.answers.get(request.path, (404, b'{"detail":"Not Found"}'))
        return web.Response(status=status, body=body)


@asynccontextmanager
async def canned(answers: dict[str, tuple[int, bytes]]) -> AsyncIterator[CannedVLLM]:
    server = CannedVLLM(answers)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


class PatientVLLMServer(VLLMServer):
    """A server whose report can take as long as tests wait: a busy machine can stall for longer than the usual
    second."""

    async def report(self, *, timeout_s: float = PATIENCE_S) -> EngineReport:
        return await super().report(timeout_s=timeout_s)


@asynccontextmanager
async def vllm_server_at(url: str, *, api_key: str | None = None) -> AsyncIterator[VLLMServer]:
    """Yields a gateway's client of a vLLM server."""
    async with server_client() as client:
        yield PatientVLLMServer(url, client, api_key=api_key)
