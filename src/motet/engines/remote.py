"""A `motet serve` server as an engine: our own protocol (`engines.wire`) over HTTP, a connection for each group.

1. the worker's keeper asks `EngineServer.report` and makes a `RemoteEngine` of the answer; a worker that was started
   again has another `engine_id`, and becomes another `RemoteEngine`
2. the request of a group goes out at once, in a task of its own; whoever iterates reads the connection, so a slow
   reader is held back by TCP and holds back nobody else
3. closing the connection frees the group there, and losing it ends the group here
4. a worker that hangs keeps its connections open; its keeper calls `lost` when it finds it silent

Faults of connections are as in `engines.http`. A refusal becomes

    5xx that is not from a server of this kind    EngineDiedError
    503                                           DrainingError, OverloadedError, or EngineDiedError if it says so
    401, 403                                      EngineError if a server of ours wants another worker key, else
                                                  OtherServerError
    404, 405, 501                                 OtherServerError: it has no such route; EngineError if it is a server
                                                  of ours that cannot be a worker because it has several models
    any other                                     EngineError that quotes it

A 4xx is not the client's fault here: the two servers have different rules for requests. Another protocol is an
EngineError; an unreadable answer, or one that cannot be right, is a WorkerFaultError.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote

import msgspec

from motet.engine import GroupStream, PreparedWeights
from motet.engines.far import FarEngine
from motet.engines.http import (
    MAX_REPORT_BYTES,
    NO_SUCH_ROUTE,
    QUESTION_TIMEOUT_S,
    REPORT_TIMEOUT_S,
    WRONG_KEY,
    Client,
    Refusal,
    Reply,
    ServerCalls,
)
from motet.engines.openai import error_in
from motet.engines.wire import (
    INVALID_WEIGHTS,
    MAX_FRAME_BYTES,
    MAX_STEP_BYTES,
    MSGPACK,
    PROTOCOL,
    PROTOCOL_HEADER,
    TENSORS,
    TOKENIZER_FILES,
    UNREADABLE,
    WORKER_KEY_CODE,
    CarriedError,
    EngineReport,
    FrameReader,
    StopChoice,
    WeightOrder,
    WeightVersion,
    checked,
)
from motet.errors import (
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    NoSingleModelError,
    NoWorkerError,
    OtherServerError,
    OverloadedError,
    RequestError,
    WorkerFaultError,
    WorkerLeavingError,
)
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.models.checkpoint import Checkpoint, MemoryFile
from motet.tracing.context import headers_of
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineInfo, GenerateRequest, GroupDelta

T = TypeVar("T")

TOKENIZER_TIMEOUT_S = 30.0
MAX_TOKENIZER_BYTES = 2**27
"""The largest have 40 MB. Other workers of the model wait meanwhile."""
WEIGHTS_TIMEOUT_S = 600.0
"""For a server that reads new weights."""
KEY_HINT = "Start this server and that one with the same --worker-key."
GONE_CODES = {EngineDiedError.code, EngineClosedError.code}


class EngineServer:
    """The routes of one server. The client belongs to whoever made it."""

    def __init__(self, url: str, client: Client, *, worker_key: str | None = None, id: str = "") -> None:
        """`id`: names the server for clients in place of its URL."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = f"the worker {id or self.url}"
        self.met = False
        """True once it has reported as a server of ours."""
        headers = {PROTOCOL_HEADER: str(PROTOCOL), "content-type": MSGPACK}
        self._calls = ServerCalls(
            self.url,
            client,
            name=self.name,
            headers=headers,
            api_key=worker_key,
            refused=lambda refusal: _refused(refusal, self.name),
        )

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> EngineReport:
        """Asks how the worker is. Raises EngineError if it speaks another protocol, OtherServerError if it is no server
        of ours, WorkerFaultError for a report that cannot be true."""
        body = await self._calls.ask("GET", "/engine", timeout_s=timeout_s, max_bytes=MAX_REPORT_BYTES)
        try:
            spoken = self._decode(body, _ProtocolReport)
            report = self._decode(body, EngineReport) if spoken.protocol == PROTOCOL else None
        except EngineError as error:
            raise OtherServerError(error.message) from error
        if report is not None:
            self.met = True
            return checked(report, self.name)
        raise EngineError(
            f"{self.name} (Motet {spoken.version}) speaks engine protocol {spoken.protocol}, and this server "
            f"{PROTOCOL}: run the same version of Motet on both"
        )

    async def tokenizer(self) -> dict[str, bytes]:
        """Returns the content of each file. Put into a folder, they are what `Tokenizer.load` reads."""
        body = await self._calls.ask(
            "GET", "/engine/tokenizer", timeout_s=TOKENIZER_TIMEOUT_S, max_bytes=MAX_TOKENIZER_BYTES
        )
        files = self._decode(body, dict[str, bytes])
        return {name: content for name, content in files.items() if name in TOKENIZER_FILES}

    async def open(self, request: GenerateRequest) -> Reply:
        body = msgspec.msgpack.encode(request)
        return await self._calls.open("/engine/generate", body, headers=_headers(request))

    async def prefill(self, request: GenerateRequest, *, readers: int) -> Ticket:
        path, body = f"/engine/prefill?readers={readers}", msgspec.msgpack.encode(request)
        answer = await self._calls.ask("POST", path, body=body, headers=_headers(request), timeout_s=None)
        ticket = self._decode(answer, Ticket)
        if not ticket.is_for(request.prompt) or ticket.cached_tokens > ticket.num_tokens:
            raise WorkerFaultError(f"{self.name} made a ticket that is not for the prompt that it was sent")
        return ticket

    async def release(self, ticket: Ticket, *, trace: str) -> None:
        await self._post("/engine/release", ticket, trace=trace)

    async def stop(self, request: GenerateRequest, index: int) -> None:
        """Ends one choice of a group, or a whole prefill."""
        await self._post("/engine/stop", StopChoice(request_id=request.request_id, index=index), trace=request.trace)

    async def connect(self, address: TransferAddress) -> None:
        await self._post("/engine/connect", address)

    async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
        """Lets the server read a folder, or sends it what is in memory here."""
        if not checkpoint.memory:
            order = WeightOrder(checkpoint.kind, tuple(map(str, checkpoint.paths)))
            answer = await self._post("/engine/weights", order, timeout_s=WEIGHTS_TIMEOUT_S)
            return self._decode(answer, PreparedWeights)
        files = checkpoint.memory
        answers = [await self._send_tensors(file, piece, of=len(files)) for piece, file in enumerate(files)]
        return self._decode(answers[-1], PreparedWeights)

    async def _send_tensors(self, file: MemoryFile, piece: int, *, of: int) -> bytes:
        with file.path.open("rb") as body:
            return await self._calls.ask(
                "POST",
                f"/engine/weights?piece={piece}&of={of}",
                body=body,
                headers={"content-type": TENSORS, "content-length": str(file.num_bytes)},
                timeout_s=WEIGHTS_TIMEOUT_S,
            )

    async def apply_weights(self, version: str, *, digest: str) -> EngineInfo:
        order = WeightVersion(version, digest)
        return self._decode(await self._post("/engine/weights/apply", order, timeout_s=WEIGHTS_TIMEOUT_S), EngineInfo)

    async def name_weights(self, version: str) -> None:
        await self._post("/engine/weights/name", WeightVersion(version))

    async def checksums(self) -> dict[str, str]:
        body = await self._calls.ask("GET", "/engine/weights/sums", timeout_s=WEIGHTS_TIMEOUT_S)
        return self._decode(body, dict[str, str])

    async def drop_weights(self, digest: str) -> None:
        await self._calls.ask("POST", f"/engine/weights/drop?digest={quote(digest)}")

    async def hold(self, held: bool) -> None:
        await self._calls.ask("POST", f"/engine/weights/hold?held={int(held)}", timeout_s=WEIGHTS_TIMEOUT_S)

    async def forget_prefixes(self, *, anew: bool) -> None:
        await self._calls.ask("POST", f"/engine/weights/forget?anew={int(anew)}")

    async def _post(
        self, path: str, body: msgspec.Struct, *, trace: str = "", timeout_s: float = QUESTION_TIMEOUT_S
    ) -> bytes:
        encoded = msgspec.msgpack.encode(body)
        return await self._calls.ask("POST", path, body=encoded, headers={"x-request-id": trace}, timeout_s=timeout_s)

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UNREADABLE as error:
            raise WorkerFaultError(f"{self.name} answered what this server cannot read: {error}") from error


class RemoteEngine(FarEngine["RemoteGroup"]):
    """An `Engine`: one start of a worker."""

    def __init__(self, server: EngineServer, report: EngineReport) -> None:
        super().__init__(server.name, report)
        self.server = server
        self._prepared = ""
        """The digest of the weights that it prepared last: an order that comes late meets no others."""

    def generate(self, request: GenerateRequest) -> GroupStream:
        if self._closed is not None:
            raise self._closed
        group = self._groups[request.request_id] = RemoteGroup(self.server, request, over=self._over)
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Returns the ticket. Cancelling it ends the group there, and gives back a ticket that was on its way."""
        asking = asyncio.ensure_future(self._call(self.server.prefill(request, readers=readers)))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._start(self._withdraw(asking, request))
            raise

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        await self._tell(self.server.release(ticket, trace=trace))

    async def connect(self, address: TransferAddress) -> None:
        """Lets the worker connect to another one before it is needed. Raises MotetError if it cannot."""
        await self._call(self.server.connect(address))

    async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
        self._prepared = ""  # if this fails, whatever it has prepared is dropped
        prepared = await self._call(self.server.prepare_weights(checkpoint))
        self._prepared = prepared.digest
        return prepared

    async def apply_weights(self, version: str) -> None:
        info = await self._call(self.server.apply_weights(version, digest=self._prepared))
        self.info = msgspec.structs.replace(info, pid=None)

    async def name_weights(self, version: str) -> None:
        await self._call(self.server.name_weights(version))
        self.info = msgspec.structs.replace(self.info, weight_version=version)

    async def checksums(self) -> dict[str, str]:
        return await self._call(self.server.checksums())

    def drop_weights(self) -> None:
        """Tells the server in a task; one that is not told forgets them by itself."""
        if self._closed is None:
            self._start(self._tell(self.server.drop_weights(self._prepared)))

    async def hold(self, held: bool) -> None:
        await self._call(self.server.hold(held))

    async def forget_prefixes(self, *, anew: bool) -> None:
        await self._call(self.server.forget_prefixes(anew=anew))

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        """Tells the worker in a task: nobody waits for an answer. For the last choice it closes the connection."""
        group = self._groups.get(request_id)
        if group is None:
            return
        group.choice_ended(index)
        if not group.released:
            self._start(self._tell_stop(group, index))

    async def stats(self) -> EngineStats:
        return (await self._call(self.server.report(timeout_s=QUESTION_TIMEOUT_S))).told_stats(self._name)

    def _over(self, group: "RemoteGroup") -> None:
        request = group.request
        self.forget(group)
        if request.ticket is not None and group.withdrawn and self._closed is None:
            # The worker may not have got the request, and then does not end the lease.
            self._start(self.release(request.ticket, trace=request.trace))

    async def _withdraw(self, asking: asyncio.Future[Ticket], request: GenerateRequest) -> None:
        """Ends a prefill whose ticket nobody wants any more. The server is told before the connection is closed: the
        answer says whether the ticket had been made by then."""
        try:
            if not asking.done():
                await self._call(self.server.stop(request, 0))
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                ticket = await asking
        except (MotetError, TimeoutError):
            asking.cancel()  # closes the connection, which ends the prefill there too
            await asyncio.gather(asking, return_exceptions=True)
        else:
            await self.release(ticket, trace=request.trace)

    async def _tell_stop(self, group: "RemoteGroup", index: int) -> None:
        await group.settled()
        await self._tell(self.server.stop(group.request, index))  # else the choice goes on until its group ends

    async def _tell(self, message: Coroutine[None, None, None]) -> None:
        with contextlib.suppress(MotetError):
            await self._call(message)


class RemoteGroup:
    """A `GroupStream`. `over` is called once, when the group does not need its connection any more."""

    def __init__(
        self, server: EngineServer, request: GenerateRequest, *, over: Callable[["RemoteGroup"], None]
    ) -> None:
        self.request = request
        self._server = server
        self._over = over
        self._unfinished = {start.index for start in request.choices}
        prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._frames = FrameReader(max_bytes=MAX_FRAME_BYTES if prompt_logprobs else MAX_STEP_BYTES)
        self._deltas: deque[GroupDelta] = deque()
        self._error: MotetError | None = None
        self._reply: Reply | None = None
        self.released = False
        """True once it has given up its connection."""
        self._opening = asyncio.create_task(self._open())

    @property
    def withdrawn(self) -> bool:
        """True if its reader closed it before the server accepted or refused the group."""
        return self.released and self._reply is None and self._error is None

    async def settled(self) -> None:
        """Returns when the server has accepted the group or never will: then the group has no task left."""
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
        """Ends the group with `error`, after the deltas that have come before."""
        if self._error is None:
            self._error = error
        self._release()

    def choice_ended(self, index: int) -> None:
        """Called when the reader ends this choice itself."""
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
                self._opening.result()  # raises the error of opening, which has been translated
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
            self.fail(EngineDiedError(f"{self._server.name} broke off before choices {sorted(self._unfinished)} ended"))

    def _take(self, content: GroupDelta | CarriedError) -> None:
        if isinstance(content, CarriedError):
            self.fail(_as_seen_from_here(content.error()))
            return
        self._deltas.append(content)
        for choice in content.choices:
            if choice.finish is not None:
                self._unfinished.discard(choice.index)
        if not self._unfinished:
            self._release()

    def _release(self) -> None:
        """Closes the connection; one whose answer was read to its end has gone back to the client already."""
        if self.released:
            return
        self.released = True
        if self._reply is None:
            self._opening.cancel()
        else:
            self._reply.close()
        self._over(self)


def _as_seen_from_here(error: MotetError) -> MotetError:
    """Translates an error about the worker itself: it closes or drains, we do not, so the group may go on elsewhere."""
    if isinstance(error, EngineClosedError | DrainingError):
        return WorkerLeavingError(error.message)
    if isinstance(error, NoWorkerError | WorkerFaultError):  # it is about its own workers; we may have others
        return EngineDiedError(error.message)
    return error


def _headers(request: GenerateRequest) -> dict[str, str]:
    return {"x-request-id": request.trace, **headers_of(request.traceparent)}


class _ProtocolReport(msgspec.Struct):
    """The fields that the report has in every version of the protocol."""

    protocol: int
    version: str = "unknown"


def _refused(refusal: Refusal, server: str) -> MotetError:
    """Turns another server's refusal into an error of ours. `server` names it in the message."""
    reason = error_in(refusal.body)
    code, status = reason and reason.code, refusal.status
    said = f"{server} answered {status}: {reason.message if reason else refusal.quoted or refusal.phrase}"
    if status in WRONG_KEY and code == WORKER_KEY_CODE:
        return EngineError(f"{said} {KEY_HINT}")
    if status in (*NO_SUCH_ROUTE, *WRONG_KEY) and code != NoSingleModelError.code:
        return OtherServerError(said)
    if reason and code == INVALID_WEIGHTS:
        return RequestError(f"{server}: {reason.message}", code=code)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and (code is None or code in GONE_CODES):
        return EngineDiedError(said)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        kind = DrainingError if code == DrainingError.code else OverloadedError
        return kind(said, retry_after_s=refusal.retry_after_s or 1)
    return EngineError(said)
