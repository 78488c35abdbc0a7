"""A `motet serve` server as an engine: the engine protocol (`engines.wire`) over HTTP, with a connection for each
group.

1. the worker's keeper calls `EngineServer.report`, and makes a `RemoteEngine` of the answer. A restarted worker has
   another `engine_id`, and becomes another `RemoteEngine`
2. the request of a group is sent at once, in a task of its own. The reader of the group reads its connection, so a slow
   reader makes TCP slow down this group, and no other group
3. closing the connection frees the group on the server. If the connection is lost, the group ends with an error
4. a worker that hangs keeps its connections open. Its keeper calls `lost` when it finds the worker silent

Faults of connections are as in `engines.http`. A refusal becomes

    5xx that is not from a Motet server           EngineDiedError
    503                                           DrainingError, OverloadedError, or EngineDiedError if it says so
    401, 403                                      EngineError if a Motet server requires another worker key, else
                                                  OtherServerError
    404, 405, 501                                 OtherServerError, because the server does not have the route;
                                                  EngineError for a Motet server with several models, which cannot be a
                                                  worker
    any other                                     EngineError that quotes the refusal

A 4xx is not the client's fault: the two servers have different rules for requests. Another protocol is an EngineError;
an answer that cannot be read or is invalid is a WorkerFaultError.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import msgspec

from motet import engine_orders as orders
from motet.engine import GroupStream, WorkerState
from motet.engines import wire
from motet.engines.http import (
    CALL_TIMEOUT_S,
    MAX_REPORT_BYTES,
    NO_SUCH_ROUTE,
    REPORT_TIMEOUT_S,
    WRONG_KEY,
    Client,
    Reply,
    ServerCalls,
)
from motet.engines.refusals import Refusal, error_in
from motet.engines.server_engine import ServerEngine
from motet.errors import (
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    ModelNotFoundError,
    MotetError,
    NoSingleModelError,
    NotFoundError,
    NoWorkerError,
    OtherServerError,
    OverloadedError,
    RequestError,
    WorkerFaultError,
    WorkerLeavingError,
)
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.settings.server_url import without_v1
from motet.tracing.context import headers_of
from motet.transfer.ticket import Ticket, is_for_prompt
from motet.types import GenerateRequest, GroupDelta

T = TypeVar("T")

TOKENIZER_TIMEOUT_S = 30.0
MAX_TOKENIZER_BYTES = 2**27
"""Maximum size of a tokenizer's files. The largest tokenizers have 40 MB."""
ORDER_TIMEOUT_S = 600.0
"""Time in seconds for a server to carry out an order, such as to read new weights."""
QUICK = orders.Connect | orders.DropWeights | orders.NameWeights | orders.ForgetPrefixes | orders.UnloadAdapter
"""The orders that need no longer time-out than other calls."""
KEY_HINT = "Start this server and that one with the same --worker-key."
CERTIFICATE_HINT = "Start this server with --worker-cert-file."
GONE_CODES = {EngineDiedError.code, EngineClosedError.code}


class ProtocolReport(msgspec.Struct):
    """The fields that a report has in every version of the protocol."""

    protocol: int
    version: str = "unknown"


ANY_REPORT = msgspec.msgpack.Decoder(ProtocolReport)
REPORT = msgspec.msgpack.Decoder(wire.EngineReport)
FILES = msgspec.msgpack.Decoder(dict[str, bytes])
TICKET = msgspec.msgpack.Decoder(Ticket)
ANSWER: msgspec.msgpack.Decoder[orders.OrderAnswer] = msgspec.msgpack.Decoder(orders.OrderAnswer)


class EngineServer:
    """The routes of one server. Does not own the HTTP client."""

    def __init__(self, url: str, client: Client, *, worker_key: str | None = None, id: str = "") -> None:
        """`id`: name of the server in messages for clients, instead of its URL."""
        self.url = without_v1(url)
        self.name = f"the worker {id or self.url}"
        self.has_reported = False
        """True once the server has reported as a Motet server."""
        headers = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL), "content-type": wire.MSGPACK}
        self._calls = ServerCalls(
            self.url,
            client,
            name=self.name,
            headers=headers,
            api_key=worker_key,
            refused=lambda refusal: _refused(refusal, self.name),
        )

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> wire.EngineReport:
        """Requests the worker's report. Raises EngineError if it uses another protocol, OtherServerError if it is not a
        Motet server, WorkerFaultError for a report that cannot be true."""
        body = await self._calls.call("GET", "/engine", timeout_s=timeout_s, max_bytes=MAX_REPORT_BYTES)
        try:
            used = self._decode(body, ANY_REPORT)
            report = self._decode(body, REPORT) if used.protocol == wire.PROTOCOL else None
        except EngineError as error:
            raise OtherServerError(error.message) from error
        if report is not None:
            self.has_reported = True
            return wire.checked(report, self.name)
        raise EngineError(
            f"{self.name} (Motet {used.version}) speaks engine protocol {used.protocol}, and this server "
            f"{wire.PROTOCOL}: run the same version of Motet on both"
        )

    async def tokenizer(self) -> dict[str, bytes]:
        """Returns the content of each file of the tokenizer. In a folder, `Tokenizer.load` can read these files."""
        body = await self._calls.call(
            "GET", "/engine/tokenizer", timeout_s=TOKENIZER_TIMEOUT_S, max_bytes=MAX_TOKENIZER_BYTES
        )
        files = self._decode(body, FILES)
        return {name: content for name, content in files.items() if name in wire.TOKENIZER_FILES}

    async def open(self, request: GenerateRequest) -> Reply:
        body = msgspec.msgpack.encode(request)
        return await self._calls.open("/engine/generate", body, headers=_headers(request))

    async def prefill(self, request: GenerateRequest, *, readers: int) -> Ticket:
        path, body = f"/engine/prefill?readers={readers}", msgspec.msgpack.encode(request)
        answer = await self._calls.call("POST", path, body=body, headers=_headers(request), timeout_s=None)
        ticket = self._decode(answer, TICKET)
        if not is_for_prompt(ticket, request.prompt) or ticket.cached_tokens > ticket.num_tokens:
            raise WorkerFaultError(f"{self.name} made a ticket that is not for the prompt that it was sent")
        return ticket

    async def release(self, ticket: Ticket, *, trace: str) -> None:
        await self._post("/engine/release", ticket, trace=trace)

    async def stop(self, request: GenerateRequest, index: int) -> None:
        """Ends one choice of a group, or a prefill."""
        await self._post(
            "/engine/stop", wire.StopChoice(request_id=request.request_id, index=index), trace=request.trace
        )

    async def send(self, order: orders.EngineOrder) -> orders.OrderAnswer:
        """Sends an order, after the files of its checkpoint if they are in memory. Raises WorkerFaultError if the
        answer does not match the order."""
        for number, path in enumerate(orders.memory_files(order)):
            await self._upload(Path(path), number)
        timeout_s = CALL_TIMEOUT_S if isinstance(order, QUICK) else ORDER_TIMEOUT_S
        answer = self._decode(await self._post("/engine/order", order, timeout_s=timeout_s), ANSWER)
        if not orders.is_answer_to(order, answer):
            raise WorkerFaultError(f"{self.name} answered {type(answer).__name__} to {type(order).__name__}")
        if isinstance(answer, orders.EngineFacts):
            wire.checked(
                wire.EngineReport(version="", engine_id="", state=WorkerState.READY, info=answer.info), self.name
            )
        return answer

    async def _upload(self, file: Path, number: int) -> None:
        with file.open("rb") as body:
            headers = {"content-type": wire.TENSORS, "content-length": str(os.fstat(body.fileno()).st_size)}
            path = f"/engine/checkpoint?file={number}"
            await self._calls.call("POST", path, body=body, headers=headers, timeout_s=ORDER_TIMEOUT_S)

    async def _post(
        self, path: str, body: msgspec.Struct, *, trace: str = "", timeout_s: float = CALL_TIMEOUT_S
    ) -> bytes:
        encoded = msgspec.msgpack.encode(body)
        return await self._calls.call("POST", path, body=encoded, headers={"x-request-id": trace}, timeout_s=timeout_s)

    def _decode(self, body: bytes, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        try:
            return decoder.decode(body)
        except wire.UNREADABLE as error:
            raise WorkerFaultError(f"{self.name} sent an answer that this server cannot read: {error}") from error


class RemoteEngine(ServerEngine["RemoteGroup"]):
    """An `Engine`: one start of a worker."""

    def __init__(self, server: EngineServer, report: wire.EngineReport) -> None:
        super().__init__(server.name, report)
        self.server = server

    def generate(self, request: GenerateRequest) -> GroupStream:
        if self._closed is not None:
            raise self._closed
        group = self._groups[request.request_id] = RemoteGroup(self.server, request, over=self._over)
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Returns the ticket. If the call is cancelled, the prefill is ended on the worker, and a ticket that was
        already sent is released."""
        prefilling = asyncio.ensure_future(self._call(self.server.prefill(request, readers=readers)))
        try:
            # Not `asyncio.shield`: since Python 3.14 it logs an error of the prefill, which `_withdraw` handles.
            await asyncio.wait([prefilling])
        except asyncio.CancelledError:
            self._start(self._withdraw(prefilling, request))
            raise
        return prefilling.result()

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        await self._try(self.server.release(ticket, trace=trace))

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        """Sends the order in a task, since no answer is needed. For the last choice, only closes the connection."""
        group = self._groups.get(request_id)
        if group is None:
            return
        group.end_choice(index)
        if not group.released:
            self._start(self._stop(group, index))

    async def send(self, order: orders.EngineOrder) -> orders.OrderAnswer:
        """Sends an order, and returns the server's answer. Does not wait for the answer to an order to drop weights: a
        server that does not receive this order drops the weights itself after some time."""
        if isinstance(order, orders.DropWeights):
            if self._closed is None:
                self._start(self._try(self._send(order)))
            return orders.Done()
        return await self._send(order)

    async def _send(self, order: orders.EngineOrder) -> orders.OrderAnswer:
        answer = await self._call(self.server.send(order))
        if isinstance(answer, orders.EngineFacts):
            self.info = msgspec.structs.replace(answer.info, pid=None)
        return answer

    async def stats(self) -> EngineStats:
        return (await self._call(self.server.report(timeout_s=CALL_TIMEOUT_S))).stats_of(self._name)

    def _over(self, group: "RemoteGroup") -> None:
        request = group.request
        self.forget(group)
        if request.ticket is not None and group.withdrawn and self._closed is None:
            # If the worker has not received the request, it does not end the lease.
            self._start(self.release(request.ticket, trace=request.trace))

    async def _withdraw(self, prefilling: asyncio.Future[Ticket], request: GenerateRequest) -> None:
        """Ends a prefill whose ticket is not needed any more. The connection stays open until the server has got the
        order, because its answer shows if the ticket had already been made."""
        try:
            if not prefilling.done():
                await self._call(self.server.stop(request, 0))
            async with asyncio.timeout(CALL_TIMEOUT_S):
                ticket = await prefilling
        except (MotetError, TimeoutError):
            prefilling.cancel()  # closes the connection, which also ends the prefill on the server
            await asyncio.gather(prefilling, return_exceptions=True)
        else:
            await self.release(ticket, trace=request.trace)

    async def _stop(self, group: "RemoteGroup", index: int) -> None:
        await group.settled()
        await self._try(self.server.stop(group.request, index))  # otherwise the choice continues until its group ends

    async def _try(self, call: Coroutine[None, None, object]) -> None:
        with contextlib.suppress(MotetError):
            await self._call(call)


class RemoteGroup:
    """A `GroupStream` of a worker. `over` is called once, when the group does not need its connection any more."""

    def __init__(
        self, server: EngineServer, request: GenerateRequest, *, over: Callable[["RemoteGroup"], None]
    ) -> None:
        self.request = request
        self._server = server
        self._over = over
        self._unfinished = {start.index for start in request.choices}
        prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._frames = wire.FrameReader(max_bytes=wire.MAX_FRAME_BYTES if prompt_logprobs else wire.MAX_STEP_BYTES)
        self._deltas: deque[GroupDelta] = deque()
        self._error: MotetError | None = None
        self._reply: Reply | None = None
        self.released = False
        """True once the group has closed its connection."""
        self._opening = asyncio.create_task(self._open())

    @property
    def withdrawn(self) -> bool:
        """True if the reader closed the group before the server accepted or refused it."""
        return self.released and self._reply is None and self._error is None

    async def settled(self) -> None:
        """Waits until the server has accepted or refused the group, or cannot be reached. No task is left then."""
        await asyncio.wait([self._opening])

    def __aiter__(self) -> "RemoteGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            await self._read()
        return self._deltas.popleft()

    async def aclose(self) -> None:
        self._deltas.clear()
        self._unfinished.clear()
        self._release()
        await self.settled()

    def fail(self, error: MotetError) -> None:
        """Ends the group with `error`, after the deltas that it has already received."""
        if self._error is None:
            self._error = error
        self._release()

    def end_choice(self, index: int) -> None:
        self._unfinished.discard(index)
        if not self._unfinished:
            self._release()

    async def _open(self) -> None:
        try:
            self._reply = await self._server.open(self.request)
        except MotetError as error:
            self.fail(error)

    async def _read(self) -> None:
        if self._reply is None:
            await self.settled()
            if self._reply is None and self._unfinished and self._error is None:
                self._opening.result()  # raises the translated error of opening
            return
        try:
            data = await self._reply.read()
            frames = self._frames.feed(data)
        except WorkerFaultError as error:
            self.fail(WorkerFaultError(f"{self._server.name}: {error.message}"))
            return
        except EngineDiedError as error:
            if self._unfinished:
                self.fail(error)
            return
        for content in frames:
            self._take(content)
        if not data and self._unfinished:
            unfinished = sorted(self._unfinished)
            self.fail(EngineDiedError(f"{self._server.name} ended its answer before the end of choices {unfinished}"))

    def _take(self, content: GroupDelta | wire.CarriedError) -> None:
        if isinstance(content, wire.CarriedError):
            self.fail(_seen_from_here(content.error()))
            return
        self._deltas.append(content)
        for choice in content.choices:
            if choice.finish is not None:
                self._unfinished.discard(choice.index)
        if not self._unfinished:
            self._release()

    def _release(self) -> None:
        """Closes the connection. If its answer was read to the end, the client has it back already."""
        if self.released:
            return
        self.released = True
        if self._reply is None:
            self._opening.cancel()
        else:
            self._reply.close()
        self._over(self)


def _seen_from_here(error: MotetError) -> MotetError:
    """Translates an error about the worker itself. The worker closes or drains and this server does not, so another
    worker can continue the group."""
    if isinstance(error, EngineClosedError | DrainingError):
        return WorkerLeavingError(error.message)
    if isinstance(error, NoWorkerError | WorkerFaultError):  # about its own workers; this server may have others
        return EngineDiedError(error.message)
    return error


def _headers(request: GenerateRequest) -> dict[str, str]:
    return {"x-request-id": request.trace, **headers_of(request.traceparent)}


def _refused(refusal: Refusal, server: str) -> MotetError:
    reason = error_in(refusal.body)
    code, status = reason and reason.code, refusal.status
    message = f"{server} answered {status}: {reason.message if reason else refusal.quoted or refusal.phrase}"
    if status in WRONG_KEY and code == wire.WORKER_KEY_CODE:
        return EngineError(f"{message} {KEY_HINT}")
    if code == wire.CERTIFICATE_REQUIRED:
        return EngineError(f"{message} {CERTIFICATE_HINT}")
    if reason and (code == wire.INVALID_WEIGHTS or code in orders.ADAPTER_CODES):
        refused = NotFoundError if status == HTTPStatus.NOT_FOUND else RequestError
        return refused(f"{server}: {reason.message}", code=code)
    if reason and code == ModelNotFoundError.code:
        return ModelNotFoundError(f"{server}: {reason.message}")
    if status in (*NO_SUCH_ROUTE, *WRONG_KEY) and code != NoSingleModelError.code:
        return OtherServerError(message)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and (code is None or code in GONE_CODES):
        return EngineDiedError(message)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        kind = DrainingError if code == DrainingError.code else OverloadedError
        return kind(message, retry_after_s=refusal.retry_after_s or 1)
    return EngineError(message)
