"""`/engine/...`: this server as a worker of a gateway, in the protocol of `engines.wire`. Not for clients."""

from importlib.metadata import version
from typing import Annotated

import msgspec
from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response

from motet.api.engine_answer import EngineAnswer
from motet.api.engine_body import checked, checked_ticket, read_body
from motet.api.engine_prefill import prefill_answer
from motet.api.kv_params import MAX_READERS
from motet.api.service import Service
from motet.api.workers import Answered, Life, ask
from motet.engines.base import Worker, WorkerState
from motet.engines.wire import MSGPACK, EngineReport, StopChoice
from motet.errors import NotFoundError, RequestError
from motet.ids import RequestId, new_engine_id
from motet.transfer.ticket import Ticket, TransferAddress, is_address
from motet.types import GenerateRequest

VERSION = version("motet")
PATIENCE_S = 0.5
"""How long the engine may take to tell its figures before the report does without them."""

Readers = Annotated[int, Query(ge=1, le=MAX_READERS)]


def engine_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/engine")
    start_id = new_engine_id("server")
    open_ids: set[RequestId] = set()

    @router.get("")
    async def report() -> Response:
        return _msgpack(await engine_report(service, start_id))

    @router.get("/tokenizer")
    async def tokenizer() -> Response:
        return _msgpack(await _tokenizer(service))

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        body = checked(await read_body(request, GenerateRequest))
        return EngineAnswer(service, service.only_model(), body, open_ids)

    @router.post("/prefill")
    async def prefill(request: Request, readers: Readers = 1) -> Response:
        return prefill_answer(service, await read_body(request, GenerateRequest), readers=readers)

    @router.post("/release")
    async def release(request: Request) -> Response:
        ticket = checked_ticket(await read_body(request, Ticket))
        await service.only_model().engine.release(ticket)
        return Response(status_code=204)

    @router.post("/stop")
    async def stop(request: Request) -> Response:
        body = await read_body(request, StopChoice)
        await service.only_model().engine.stop_choice(body.request_id, body.index)
        return Response(status_code=204)

    @router.post("/connect")
    async def connect(request: Request) -> Response:
        await _connect(service, await read_body(request, TransferAddress))
        return Response(status_code=204)

    return router


async def engine_report(service: Service, start_id: str) -> EngineReport:
    """`start_id`: of this server, whose engine is named by it if it shares its KV with nobody."""
    engine = service.only_model().engine
    (answer,) = await ask([Worker("engine", engine, "")], patience_s=PATIENCE_S)
    info = engine.info
    return EngineReport(
        version=VERSION,
        engine_id=info.transfer.engine_id if info.transfer else start_id,
        state=_state(answer, draining=service.admission.draining),
        info=info,
        stats=answer.stats,
        block_events=service.block_events(),
    )


def _state(answer: Answered, *, draining: bool) -> WorkerState:
    match answer.life:
        case Life.DEAD:
            return WorkerState.DEAD
        case Life.SILENT:
            return WorkerState.SILENT
        case Life.ANSWERED:
            return WorkerState.DRAINING if draining else WorkerState.READY


async def _tokenizer(service: Service) -> dict[str, bytes]:
    """All that a server of the same model needs, with the chat template that is used here."""
    if service.tokenizer_files is None:
        raise NotFoundError("This server hands out no tokenizer.")
    tokenizer = service.only_model().tokenizer
    files = await to_thread.run_sync(service.tokenizer_files)
    if (template := tokenizer.chat_template) is not None:
        files = files | {"chat_template.jinja": template.encode()}
    return files


async def _connect(service: Service, address: TransferAddress) -> None:
    if not (is_address(address.host) and 0 < address.port < 2**16):
        raise RequestError(f"{address.host}:{address.port} is no address and port.", code="invalid_value")
    if service.connect is None:
        raise NotFoundError("The engine of this server connects to no other.")
    await service.connect(address)


def _msgpack(body: object) -> Response:
    return Response(msgspec.msgpack.encode(body), media_type=MSGPACK)
