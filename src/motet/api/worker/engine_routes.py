"""`/engine/...`: this server as a worker of a gateway, in the protocol of `engines.wire`. Not for clients:
`api.http.gate` requires the worker key.

    POST /engine/generate   the deltas of one group as frames, as long as the connection lasts
        1. check, find a place, submit   an error up to here has its HTTP status, and the group's ticket is given back
        2. headers                       the sender knows that the group is here
        3. frames                        what the engine has told since the last send, in one send
        4. close the group               whatever happened: end, error, sender gone, server stopping
        An error after the headers is the last frame.
    POST /engine/prefill    `PrefillAnswer`: a ticket

What is sent is read and checked like anything that comes from outside. It may hold what the public routes let through
and nothing else, so that no body can bring an engine to do what no request of a client could.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

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
from motet.api.generation.plan import AnswerHead, Plan, check_scores
from motet.api.generation.request_fields import MAX_KEEP_S
from motet.api.http.admission import AdmissionSlot
from motet.api.http.caller import caller_of, is_id
from motet.api.http.failure import INTERNAL, invalid_value
from motet.api.http.request_spans import RequestSpan, error_of, group_span_of
from motet.api.http.routes import body_of, drop_body, new_router
from motet.api.served import ServedModel
from motet.api.service import Service, snapshot_workers
from motet.engine import GroupStream, Worker, WorkerReport, WorkerState
from motet.engines.wire import (
    FRAMES,
    MSGPACK,
    PROTOCOL,
    PROTOCOL_HEADER,
    UNREADABLE,
    CarriedError,
    EngineReport,
    StopChoice,
    frame,
)
from motet.errors import EngineError, MotetError, NotFoundError, OverloadedError, RequestError
from motet.ids import RequestId, new_engine_id, new_request_id
from motet.merge import Take
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep
from motet.tracing.spans import NO_SPAN
from motet.transfer.ticket import Ticket, TransferAddress, is_address, params_of, ticket_of
from motet.types import SAMPLING_FIELDS, ChoiceStart, GenerateRequest, GroupDelta, Role, SamplingParams, Usage

T = TypeVar("T")

PATIENCE_S = 0.5
"""Seconds for which a report waits for the engine's figures; after that it goes without them."""
MAX_INDEX = 2**31
MAX_CONNECTING = 256
"""Most connections to other workers that gateways may have made at a time: each takes a socket for seconds."""

Readers = Annotated[int, Query(ge=1, le=MAX_READERS)]


def engine_router(service: Service) -> APIRouter:
    router = new_router("/engine", told=False)
    start_id = new_engine_id("server")
    open_ids: set[RequestId] = set()
    """The groups that answers of these routes have open."""
    prefills: dict[RequestId, PrefillAnswer] = {}
    connecting: set[object] = set()
    """A mark for each connection that is being made."""

    @router.get("")
    async def report() -> Response:
        return msgpack_response(await engine_report(service, start_id))

    @router.get("/tokenizer")
    async def tokenizer() -> Response:
        return msgpack_response(await _tokenizer(service))

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        """No client's limits apply here: the gateway has counted the choices."""
        body = await _read_group(request)
        if body.ticket is not None:
            checked_ticket(body.ticket)  # it is given back if the group is refused
        group = WorkerGroup(service, body, open_ids=open_ids, span=caller_of(request).span)
        return GeneratedResponse(service, [group], writer=FrameWriter(body), client=None, num_choices=len(body.choices))

    @router.post("/prefill")
    async def prefill(request: Request, readers: Readers = 1) -> Response:
        body = await _read_group(request)
        return PrefillAnswer(service, body, readers=readers, running=prefills, span=caller_of(request).span)

    @router.post("/release")
    async def release(request: Request) -> Response:
        ticket = checked_ticket(await read_body(request, Ticket))
        await service.only_model().engine.release(ticket, trace=caller_of(request).trace)
        return Response(status_code=204)

    @router.post("/stop")
    async def stop(request: Request) -> Response:
        body = await read_body(request, StopChoice)
        if (prefill := prefills.get(body.request_id)) is not None:
            prefill.withdraw()
        else:
            await service.only_model().engine.stop_choice(body.request_id, body.index)
        return Response(status_code=204)

    @router.post("/connect")
    async def connect(request: Request) -> Response:
        await _connect(service, await read_body(request, TransferAddress), connecting=connecting)
        return Response(status_code=204)

    return router


async def engine_report(service: Service, start_id: str) -> EngineReport:
    """`start_id`: the id of this start of the server; an engine that shares its KV with nobody is named by it."""
    engine, draining = service.only_model().engine, service.admission.draining
    here = WorkerReport(id="", address="", state=WorkerState.READY, worker=Worker("", engine, ""))
    (seen,) = await snapshot_workers([here], patience_s=PATIENCE_S, draining=draining)
    info = engine.info
    return EngineReport(
        version=__version__,
        engine_id=info.transfer.engine_id if info.transfer else start_id,
        state=seen.state,
        info=info,
        stats=seen.stats,
        block_events=service.block_events(),
    )


async def _tokenizer(service: Service) -> dict[str, bytes]:
    """Returns the tokenizer's files, with the chat template that is used here."""
    if service.tokenizer_files is None:
        raise NotFoundError("This server hands out no tokenizer.")
    tokenizer = service.only_model().tokenizer
    files = await to_thread.run_sync(service.tokenizer_files)
    if (template := tokenizer.chat_template) is not None:
        files = files | {"chat_template.jinja": template.encode()}
    return files


async def _connect(service: Service, address: TransferAddress, *, connecting: set[object]) -> None:
    """Raises RequestError if the engine cannot connect to that address."""
    if not (is_address(address.host) and 0 < address.port < 2**16):
        raise RequestError(f"{address.host}:{address.port} is no address and port.", code="invalid_value")
    if service.connect is None:
        raise NotFoundError("The engine of this server connects to no other.")
    if len(connecting) >= MAX_CONNECTING:
        raise OverloadedError(f"{MAX_CONNECTING} connections are being made here, and that is the limit.")
    connecting.add(mark := object())
    try:
        await service.connect(address)
    except EngineError as error:
        if error.status != EngineError.status:
            raise
        raise RequestError(error.message, code="cannot_connect") from error
    finally:
        connecting.discard(mark)


def msgpack_response(body: object) -> Response:
    return Response(msgspec.msgpack.encode(body), media_type=MSGPACK)


class WorkerGroup(AnswerGroup[GroupDelta, Usage]):
    """A group that a gateway has placed here, as the engine's own deltas."""

    def __init__(
        self, service: Service, request: GenerateRequest, *, open_ids: set[RequestId], span: RequestSpan
    ) -> None:
        """`span`: that of the request."""
        self._service, self._served = service, service.only_model()
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

    def open(self, place: AdmissionSlot) -> None:
        served = self._served
        check_group(served, self._request)
        self._span = span = group_span_of(self._parent, self._request, model=served.name)
        request = self._request = span.placed(self._request)
        if request.request_id in self._open_ids:
            raise OverloadedError(f"The group {request.request_id} is still open here. Try again, or another worker.")
        self._stream = (served.placed or served.engine).generate(request)
        self._open_ids.add(request.request_id)
        self._account = GroupAccount.of_tokens(self._service, served, request=request, place=place, span=span)

    async def run(self, take: Take[GroupDelta]) -> None:
        assert self._stream is not None and self._account is not None  # it has been opened
        tokens = self._tokens
        async for delta in self._stream:
            for choice in delta.choices:
                tokens[choice.index] = tokens.get(choice.index, 0) + len(choice.token_ids)
            if delta.prompt is not None:
                self._cached_tokens = delta.prompt.cached_tokens
            ends = [(one.index, one.finish.reason if one.finish else None) for one in delta.choices]
            self._account.step([ChoiceEvent(index, "", (), finish=finish) for index, finish in ends], True)
            if (taking := take((delta,))) is not None:
                await taking

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

    def __init__(self, request: GenerateRequest) -> None:
        self._unfinished = {start.index for start in request.choices}

    def feed(self, steps: Sequence[GroupDelta], usage: Callable[[], Usage]) -> bytes:
        for delta in steps:
            self._unfinished.difference_update(one.index for one in delta.choices if one.finish is not None)
        return b"".join(map(frame, steps))

    def close(self, usage: Usage) -> Sequence[bytes]:
        return []

    def fail(self, error: Exception) -> bytes:
        if not isinstance(error, MotetError):
            error = EngineError(INTERNAL.message)
        return frame(CarriedError.of(error))

    @property
    def complete(self) -> bool:
        """True once the end of the last choice is sent: its reader need not wait for the end of the body."""
        return not self._unfinished


class PrefillAnswer(GeneratedResponse[GroupStep, Usage]):
    """An answer that is a ticket. It is admitted and counted like any other, and cancelled, with its lease, when the
    sender leaves or takes its request back. Until then it is in `running`, under the sender's id of the request."""

    def __init__(
        self,
        service: Service,
        request: GenerateRequest,
        *,
        readers: int,
        running: dict[RequestId, "PrefillAnswer"],
        span: RequestSpan,
    ) -> None:
        """`span`: that of the request. Raises RequestError. One choice stands for all: whoever reads the ticket writes
        the tokens of each."""
        served = service.only_model()
        if served.info.role is not Role.PREFILL:
            raise RequestError(
                f"This is a worker with role {served.info.role}; it prefills nothing for others.", code="wrong_role"
            )
        group = msgspec.structs.replace(
            request, request_id=new_request_id("prefill"), choices=(ChoiceStart(0, 0),), ticket=None
        )
        check_group(served, group)
        if len(group.prompt) < 2:
            raise RequestError("A prompt of one token is run by who decodes it, and not prefilled.", param="prompt")
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
        """Ends the prefill, unless its ticket has been sent."""
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
            raise RequestError("The sender has taken this prefill back.", code="withdrawn")


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


async def read_body(request: Request, kind: type[T]) -> T:
    """Returns the body. Raises RequestError for another protocol, and for a body of another kind."""
    spoken = request.headers.get(PROTOCOL_HEADER)
    if spoken != str(PROTOCOL):
        raise RequestError(
            f"This worker speaks engine protocol {PROTOCOL}, and was asked in {spoken or 'none'}. These routes are for "
            "gateways: run the same version of Motet on both sides.",
            code="engine_protocol",
        )
    body = await body_of(request)
    drop_body(request)
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNREADABLE as error:
        raise RequestError(f"The body is no {kind.__name__} in msgpack: {error}", code="invalid_body") from error


async def _read_group(request: Request) -> GenerateRequest:
    """Returns the group that was sent. Its place in a trace comes in headers, as from anybody, and is checked there."""
    body = await read_body(request, GenerateRequest)
    return body if body.traceparent is None else msgspec.structs.replace(body, traceparent=None)


def checked_ticket(ticket: Ticket) -> Ticket:
    """Raises RequestError for a ticket that no worker can have made; it is not even given back."""
    return ticket_of(params_of(ticket))


def check_group(served: ServedModel, request: GenerateRequest) -> None:
    """Raises RequestError, naming the field."""
    for name in ("request_id", "trace", "session_id"):
        value = getattr(request, name)
        if not (is_id(value) or (value == "" and name != "request_id")):
            raise invalid_value(name, "up to 200 printable characters without spaces are allowed")
    if request.model not in ("", served.info.model):
        raise invalid_value("model", f"{request.model!r} is not here; this worker has {served.info.model!r}")
    if not -(2**63) <= request.priority < 2**63:
        raise invalid_value("priority", f"{request.priority} has more than 64 bits")
    if not 0 <= request.keep_s <= MAX_KEEP_S:
        raise invalid_value("keep_s", f"{request.keep_s} is not from 0 to {MAX_KEEP_S:g}")
    sampling = request.sampling
    served.preparer.check_prompt(request.prompt, param="prompt")
    if sampling.max_tokens < 1:
        raise invalid_value("max_tokens", f"{sampling.max_tokens}; at least 1 is allowed")
    served.preparer.max_tokens(len(request.prompt), sampling.max_tokens, default=None, param="prompt")
    _check_sampling(sampling)
    check_scores(len(request.prompt), sampling.prompt_logprobs, prompt_param="prompt")
    _check_tokens("stop_token_ids", sampling.stop_token_ids, served=served)
    _check_tokens("logit_bias", sampling.logit_bias, served=served)
    _check_tokens("logprob_token_ids", sampling.logprob_token_ids, served=served)
    _check_tokens("allowed_token_ids", sampling.allowed_token_ids, served=served)
    _check_choices(served, request)
    if request.ticket is not None:
        if served.info.role is not Role.DECODE:
            raise invalid_value("ticket", f"this is a worker with role {served.info.role}, and takes none")
        if not request.ticket.is_for(request.prompt):
            raise invalid_value("ticket", "it is for another prompt")


def _check_sampling(sampling: SamplingParams) -> None:
    for name, field in SAMPLING_FIELDS.items():
        value = getattr(sampling, name)
        for one in value.values() if isinstance(value, dict) else () if value is None else (value,):
            if not field.allows(one):
                raise invalid_value(name, f"{one}; {field.words} is allowed")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise invalid_value("min_tokens", f"{sampling.min_tokens}; 0 to max_tokens, {sampling.max_tokens}, is allowed")


def _check_choices(served: ServedModel, request: GenerateRequest) -> None:
    choices, most, max_tokens = request.choices, served.info.max_num_seqs, request.sampling.max_tokens
    if not 1 <= len(choices) <= most:
        raise invalid_value("choices", f"{len(choices)} of them; 1 to {most} are allowed")
    if len({choice.index for choice in choices}) < len(choices):
        raise invalid_value("choices", "two have the same index")
    for choice in choices:
        if not 0 <= choice.index < MAX_INDEX:
            raise invalid_value("choices", f"index {choice.index}")
        if not 0 <= choice.seed < 2**64:
            raise invalid_value("choices", f"seed {choice.seed} is no unsigned number of 64 bits")
        if len(choice.output_tokens) >= max_tokens:
            raise invalid_value("choices", f"choice {choice.index} has written its {max_tokens} tokens already")
        _check_tokens("choices", choice.output_tokens, served=served)


def _check_tokens(param: str, tokens: Iterable[int], *, served: ServedModel) -> None:
    """Raises unless all tokens are in the model's vocabulary."""
    if known := sorted(tokens):
        served.preparer.check_prompt((known[0], known[-1]), param=param)
