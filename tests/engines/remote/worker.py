"""The gateway's side of a worker: engines over real sockets, and servers with scripted answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from motet.engine import Engine, WorkerState
from motet.engines.http import server_client
from motet.engines.remote import EngineServer, RemoteEngine
from motet.engines.wire import EngineReport
from motet.ids import RequestId
from motet.testing.fake_engine import fake_info
from motet.transfer.ticket import Ticket
from motet.types import ChoiceStart, GenerateRequest, GroupDelta, Role, SamplingParams, choice_starts
from tests.api.serving import WatchedEngine
from tests.patience import PATIENCE_S

PROMPT = tuple(range(5, 25))
SAMPLING = SamplingParams(max_tokens=50)


def group(
    name: str = "g",
    *,
    n: int = 2,
    choices: tuple[ChoiceStart, ...] | None = None,
    sampling: SamplingParams = SAMPLING,
    prompt: tuple[int, ...] = PROMPT,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt=prompt,
        choices=choices or choice_starts(n, seed=7),
        sampling=sampling,
        trace=f"trace-{name}",
    )


class PatientServer(EngineServer):
    """A worker whose report can take as long as tests wait: a busy machine can stall for the usual second."""

    async def report(self, *, timeout_s: float = PATIENCE_S) -> EngineReport:
        return await super().report(timeout_s=timeout_s)


async def deltas_of(engine: Engine, request: GenerateRequest) -> list[GroupDelta]:
    return [delta async for delta in engine.generate(request)]


@asynccontextmanager
async def engine_at(url: str, *, worker_key: str | None = None) -> AsyncIterator[RemoteEngine]:
    """Makes the engine of a server that answers."""
    async with server_client() as client:
        server = PatientServer(url, client, worker_key=worker_key)
        engine = RemoteEngine(server, await server.report())
        try:
            yield engine
        finally:
            await engine.close()


def counting(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    """Returns the tokens of choice i, which ends after 3 + i % 5 of them."""
    return [*range(10 + start.index % 7, 13 + start.index % 7 + start.index % 5), 0]


def endless(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    return [10 + start.index]


class ReportingEngine(WatchedEngine):
    """An engine with events for a stopped choice and for a released ticket."""

    def __init__(self, *, role: Role = Role.BOTH, gated: bool = False) -> None:
        super().__init__(endless, role=role, gated=gated)
        self.stopped = asyncio.Event()
        self.ticket_released = asyncio.Event()

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        await super().stop_choice(request_id, index)
        self.stopped.set()

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        await super().release(ticket, trace=trace)
        self.ticket_released.set()


REPORT = EngineReport(version="0", engine_id="scripted", state=WorkerState.READY, info=fake_info())

Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(conversation: Conversation) -> AsyncIterator[RemoteEngine]:
    """Makes the engine of a server that holds this conversation over each connection, and then closes it."""
    over: list[asyncio.Event] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over.append(asyncio.Event())
        mine = over[-1]
        try:
            await conversation(reader, writer)
        finally:
            writer.close()
            mine.set()

    listener = await asyncio.start_server(converse, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, server_client() as client:
        engine = RemoteEngine(PatientServer(f"http://127.0.0.1:{port}", client), REPORT)
        try:
            yield engine
        finally:
            await engine.close()
            for conversation_over in over:
                await conversation_over.wait()


def response(status: str, *parts: bytes, headers: Sequence[str] = ()) -> bytes:
    """Returns a response in chunks without its last chunk."""
    head = "\r\n".join((f"HTTP/1.1 {status}", "transfer-encoding: chunked", *headers, "", ""))
    return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


LAST_CHUNK = b"0\r\n\r\n"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Reads a request, and returns its head."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head
