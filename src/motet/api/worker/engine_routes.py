"""`/engine/...`: this server as the worker of a gateway, in the protocol of `engines.wire`. Not for clients:
`api.http.gate` requires the worker key.

    POST /engine/generate   the deltas of one group as frames, as long as the connection lasts
        1. check, admit, submit   an error up to here has its HTTP status, and the group's ticket is released
        2. headers                the gateway knows that the worker has the group
        3. frames                 all deltas since the last send, in one send
        4. close the group        after its end, an error, or when the gateway disconnects or the server stops
        An error after the headers is the last frame.
    POST /engine/prefill    `PrefillAnswer`: a ticket
    POST /engine/order      an order (`engine_orders`). Orders that concern the weights need `--rl`
    POST /engine/checkpoint one file of a checkpoint in the gateway's memory. The gateway sends the files with ?file=0,
                            ?file=1 ..., and then the order to prepare them, with a path for each file

`worker_bodies` checks the bodies."""

from collections.abc import Callable, Sequence
from typing import Annotated

import anyio
import msgspec
from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send

from motet import __version__
from motet.api.generation.answer import GeneratedResponse
from motet.api.generation.answer_writer import AnswerWriter, GroupsWriter
from motet.api.generation.groups import AnswerGroup, GroupAccount, TokenGroup
from motet.api.generation.kv_params import MAX_READERS, PrefillOrder
from motet.api.generation.plan import AnswerHead, Plan
from motet.api.http.admission import AdmissionSlot
from motet.api.http.caller import caller_of
from motet.api.http.failure import INTERNAL
from motet.api.http.request_spans import RequestSpan, error_of, group_span_of
from motet.api.http.routes import new_router
from motet.api.service import Service, snapshot_workers
from motet.api.tensor_bodies import read_tensors
from motet.api.worker.worker_bodies import (
    TICKET,
    check_group,
    check_protocol,
    checked_ticket,
    msgpack_response,
    read_body,
    read_group,
)
from motet.control.checkpoint_upload import MAX_FILES, CheckpointUpload
from motet.engine import GroupStream, Worker, WorkerReport, WorkerState
from motet.engine_orders import AdapterOrder, Connect, Done, WorkerOrder, memory_files
from motet.engines.wire import FRAMES, MSGPACK, CarriedError, EngineReport, StopChoice, frame
from motet.errors import EngineError, MotetError, NotFoundError, OverloadedError, RequestError
from motet.ids import RequestId, new_engine_id, new_request_id
from motet.merge import Take
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep
from motet.tracing.spans import NO_SPAN
from motet.transfer.ticket import Ticket, TransferAddress, is_address
from motet.types import ChoiceStart, GenerateRequest, GroupDelta, Role, Usage

PATIENCE_S = 0.5
"""Time in seconds after which a report is sent without the engine's figures."""
MAX_CONNECTING = 256
"""Maximum number of connections to other workers that are being made at a time. Each takes a socket for seconds."""

STOP = msgspec.msgpack.Decoder(StopChoice)
ORDER: msgspec.msgpack.Decoder[WorkerOrder] = msgspec.msgpack.Decoder(WorkerOrder)

Readers = Annotated[int, Query(ge=1, le=MAX_READERS)]
FileNumber = Annotated[int, Query(ge=0, lt=MAX_FILES)]


def engine_router(service: Service) -> APIRouter:
    router = new_router("/engine", documented=False)
    start_id = new_engine_id("server")
    open_ids: set[RequestId] = set()
    """Ids of the groups that are open in answers of these routes."""
    prefills: dict[RequestId, PrefillAnswer] = {}

    @router.get("")
    async def report() -> Response:
        return msgpack_response(await engine_report(service, start_id))

    @router.get("/tokenizer")
    async def tokenizer() -> Response:
        return msgpack_response(await _tokenizer(service))

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        """The limits of clients do not apply: the gateway has counted the choices."""
        body = await read_group(request)
        if body.ticket is not None:
            checked_ticket(body.ticket)  # the ticket is released if the group is refused
        group = WorkerGroup(service, body, open_ids=open_ids, span=caller_of(request).span)
        return GeneratedResponse(service, [group], writer=FrameWriter(body), client=None, num_choices=len(body.choices))

    @router.post("/prefill")
    async def prefill(request: Request, readers: Readers = 1) -> Response:
        body = await read_group(request)
        return PrefillAnswer(service, body, readers=readers, running=prefills, span=caller_of(request).span)

    @router.post("/release")
    async def release(request: Request) -> Response:
        ticket = checked_ticket(await read_body(request, TICKET))
        await service.only_model().engine.release(ticket, trace=caller_of(request).trace)
        return Response(status_code=204)

    @router.post("/stop")
    async def stop(request: Request) -> Response:
        body = await read_body(request, STOP)
        if (prefill := prefills.get(body.request_id)) is not None:
            prefill.withdraw()
        else:
            await service.only_model().engine.stop_choice(body.request_id, body.index)
        return Response(status_code=204)

    return router


async def engine_report(service: Service, start_id: str) -> EngineReport:
    """Returns the report for a gateway. `start_id`: id of this start of the server, if the engine transfers no KV."""
    engine, draining = service.only_model().engine, service.admission.draining
    own_report = WorkerReport(id="", address="", state=WorkerState.READY, worker=Worker("", engine, ""))
    (snapshot,) = await snapshot_workers([own_report], patience_s=PATIENCE_S, draining=draining)
    info = engine.info
    return EngineReport(
        version=__version__,
        engine_id=info.transfer.engine_id if info.transfer else start_id,
        state=snapshot.state,
        info=info,
        stats=snapshot.stats,
        block_events=service.block_events(),
    )


async def _tokenizer(service: Service) -> dict[str, bytes]:
    """Returns the tokenizer's files, with the chat template that this server uses."""
    if service.tokenizer_files is None:
        raise NotFoundError("This server provides no tokenizer.")
    tokenizer = service.only_model().tokenizer
    files = await to_thread.run_sync(service.tokenizer_files)
    if (template := tokenizer.chat_template) is not None:
        files = files | {"chat_template.jinja": template.encode()}
    return files


class WorkerGroup(AnswerGroup[GroupDelta, Usage]):
    """A group that a gateway has placed on this worker, as the engine's own deltas."""

    def __init__(
        self, service: Service, request: GenerateRequest, *, open_ids: set[RequestId], span: RequestSpan
    ) -> None:
        self._service, self._served = service, service.model_of(request)
        self._parent, self._span = span, NO_SPAN
        self._request = request
        self._open_ids = open_ids
        self._stream: GroupStream | None = None
        self._account: GroupAccount | None = None
        self._tokens: dict[int, int] = {}
        """Number of output tokens of each choice that has any."""
        self._cached_tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self._request.prompt),
            completion_tokens=sum(self._tokens.values()),
            cached_tokens=self._cached_tokens,
        )

    @property
    def worker(self) -> str:
        return self._service.only_worker

    def open(self, slot: AdmissionSlot) -> None:
        served = self._served
        check_group(served, self._request)
        self._span = span = group_span_of(self._parent, self._request, model=served.name)
        request = self._request = span.placed(self._request)
        if (id := request.request_id) in self._open_ids:
            raise OverloadedError(f"The group {id} is still open on this worker. Try again, or another worker.")
        self._stream = (served.placed or served.engine).generate(request)
        self._open_ids.add(id)
        self._account = GroupAccount.of_tokens(self._service, served, request=request, slot=slot, span=span)

    async def run(self, take: Take[GroupDelta]) -> None:
        assert self._stream is not None and self._account is not None  # the group is open
        tokens = self._tokens
        async for delta in self._stream:
            for choice in delta.choices:
                tokens[choice.index] = tokens.get(choice.index, 0) + len(choice.token_ids)
            if delta.prompt is not None:
                self._cached_tokens = delta.prompt.cached_tokens
            ends = [(choice.index, choice.finish.reason if choice.finish else None) for choice in delta.choices]
            self._account.step([ChoiceEvent(index, "", (), finish=finish) for index, finish in ends], True)
            if (pending := take((delta,))) is not None:
                await pending

    async def close(self, *, status: int) -> None:
        if self._stream is None:
            self._span.end(error=error_of(status))
            if self._request.ticket is not None:
                await self._served.engine.release(self._request.ticket, trace=self._request.trace)
            return
        self._open_ids.discard(self._request.request_id)
        if self._account is not None:
            self._account.end(status=status, worker=self.worker, usage=self.usage, tokens=self._tokens)
        await self._stream.aclose()


class FrameWriter(AnswerWriter[GroupDelta, Usage]):
    content_type = FRAMES
    starts_at_once = True
    takes_all_steps = True

    def __init__(self, request: GenerateRequest) -> None:
        self._unfinished = {start.index for start in request.choices}

    def feed(self, steps: Sequence[GroupDelta], usage: Callable[[], Usage]) -> bytes:
        for delta in steps:
            self._unfinished.difference_update(choice.index for choice in delta.choices if choice.finish is not None)
        return b"".join(map(frame, steps))

    def close(self, usage: Usage) -> Sequence[bytes]:
        return []

    def fail(self, error: Exception) -> bytes:
        if not isinstance(error, MotetError):
            error = EngineError(INTERNAL.message)
        return frame(CarriedError.of(error))

    @property
    def complete(self) -> bool:
        """True once the ends of all choices are sent: the gateway does not wait for the end of the body."""
        return not self._unfinished


class PrefillAnswer(GeneratedResponse[GroupStep, Usage]):
    """An answer that is a ticket. It is admitted and counted like any other answer. When the gateway disconnects or
    withdraws the request, the prefill is cancelled and its lease ends."""

    def __init__(
        self,
        service: Service,
        request: GenerateRequest,
        *,
        readers: int,
        running: dict[RequestId, "PrefillAnswer"],
        span: RequestSpan,
    ) -> None:
        """`running`: has this object under the gateway's id of the request while the prefill runs. `span`: the span of
        the request. Raises RequestError. The group has one choice: the readers of the ticket generate the choices."""
        served = service.model_of(request)
        if served.info.role is not Role.PREFILL:
            why = f"has the role {served.info.role}, and does not prefill for other workers"
            raise RequestError(f"This worker {why}.", code="wrong_role")
        group = msgspec.structs.replace(
            request, request_id=new_request_id("prefill"), choices=(ChoiceStart(0, 0),), ticket=None
        )
        check_group(served, group)
        if len(group.prompt) < 2:
            why = "A prompt of one token is not prefilled: the decode worker computes it itself."
            raise RequestError(why, param="prompt")
        plan = Plan(
            head=AnswerHead(id=group.request_id, created=served.created, model=served.name),
            served=served,
            groups=(group,),
            order=PrefillOrder(do_remote_decode=True, readers=readers),
            span=span,
        )
        groups = [TokenGroup(service, plan, number=0, known=None)]
        super().__init__(service, groups, writer=TicketWriter(), client=None, num_choices=1)
        self._id = request.request_id
        self._running = running
        self._withdrawn = anyio.CancelScope()

    def withdraw(self) -> None:
        """Ends the prefill unless its ticket has been sent."""
        self._withdrawn.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._running[self._id] = self
        try:
            with self._withdrawn:
                await super().__call__(scope, receive, send)
        finally:
            if self._running.get(self._id) is self:
                del self._running[self._id]
        if self._withdrawn.cancelled_caught and not self.started:
            raise RequestError("The sender has withdrawn this prefill.", code="withdrawn")


class TicketWriter(GroupsWriter):
    content_type = MSGPACK
    streams = False

    def __init__(self) -> None:
        self._ticket: Ticket | None = None

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            self._ticket = step.ticket or self._ticket
        return b""

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [msgspec.msgpack.encode(self._ticket)]


def order_router(service: Service) -> APIRouter:
    router = new_router("/engine", documented=False)
    upload = CheckpointUpload()
    connecting: set[object] = set()
    """One object for each connection that is being made."""

    @router.post("/order")
    async def order(request: Request) -> Response:
        nonlocal upload
        order = await read_body(request, ORDER, kind="WorkerOrder")
        if isinstance(order, Connect):
            await _connect(service, order.address, connecting=connecting)
            return msgpack_response(Done())
        if isinstance(order, AdapterOrder):
            control, checkpoint = service.adapter_control(), None
        else:
            control, checkpoint = service.opened(service.control), None
        if files := memory_files(order):
            if len(files) != len(upload.files):
                message = f"the order names {len(files)} files, and {len(upload.files)} were received"
                raise RequestError(message, code="invalid_value")
            checkpoint, upload = upload.finish(), CheckpointUpload()
        return msgpack_response(await control.obey(order, uploaded=checkpoint))

    @router.post("/checkpoint")
    async def upload_file(request: Request, file: FileNumber) -> Response:
        """Receives one file of a checkpoint. The first file replaces an earlier checkpoint."""
        nonlocal upload
        check_protocol(request)
        service.adapter_control()
        if file == 0:
            upload.drop()
            upload = CheckpointUpload()
        tensors, names = await read_tensors(request, service.tensor_memory)
        if file != len(upload.files):
            tensors.close()
            raise RequestError(f"received file {file}, but expected file {len(upload.files)}", code="invalid_value")
        upload.add(tensors, names)
        return Response(status_code=204)

    return router


async def _connect(service: Service, address: TransferAddress, *, connecting: set[object]) -> None:
    """Connects the engine to another worker. Raises RequestError, NotFoundError or OverloadedError if it cannot."""
    if not (is_address(address.host) and 0 < address.port < 2**16):
        raise RequestError(f"{address.host}:{address.port} is not an address and port.", code="invalid_value")
    if service.connect is None:
        raise NotFoundError("The engine of this server does not connect to other workers.")
    if len(connecting) >= MAX_CONNECTING:
        raise OverloadedError(f"This worker is making {MAX_CONNECTING} connections, which is the limit.")
    connecting.add(mark := object())
    try:
        await service.connect(address)
    except EngineError as error:
        if error.status != EngineError.status:
            raise
        raise RequestError(error.message, code="cannot_connect") from error
    finally:
        connecting.discard(mark)
