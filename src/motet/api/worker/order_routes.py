"""`/engine/order`: the orders of a gateway to this worker (`engine_orders`), with the worker key.

Orders that concern the weights need `--rl`. If a checkpoint is in the gateway's memory, the gateway first sends its
files to `/engine/checkpoint?file=0`, `?file=1` ..., and then the order to prepare it, with a path for each file.
"""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from motet.api.http.routes import new_router
from motet.api.service import Service
from motet.api.tensor_bodies import read_tensors
from motet.api.worker.worker_bodies import check_protocol, msgpack_response, read_body
from motet.control.checkpoint_upload import MAX_FILES, CheckpointUpload
from motet.engine_orders import Connect, Done, PrepareWeights, WorkerOrder
from motet.errors import EngineError, NotFoundError, OverloadedError, RequestError
from motet.models.checkpoint import CheckpointKind
from motet.transfer.ticket import TransferAddress, is_address

MAX_CONNECTING = 256
"""Maximum number of connections to other workers that are being made at a time. Each takes a socket for seconds."""

ORDER: msgspec.msgpack.Decoder[WorkerOrder] = msgspec.msgpack.Decoder(WorkerOrder)

FileNumber = Annotated[int, Query(ge=0, lt=MAX_FILES)]


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
        control, checkpoint = service.opened(service.control), None
        if isinstance(order, PrepareWeights) and order.kind is CheckpointKind.MEMORY:
            if len(order.paths) != len(upload.files):
                message = f"the order names {len(order.paths)} files, and {len(upload.files)} were received"
                raise RequestError(message, code="invalid_value")
            checkpoint, upload = upload.finish(), CheckpointUpload()
        return msgpack_response(await control.obey(order, uploaded=checkpoint))

    @router.post("/checkpoint")
    async def upload_file(request: Request, file: FileNumber) -> Response:
        """Receives one file of a checkpoint. The first file replaces an earlier checkpoint."""
        nonlocal upload
        check_protocol(request)
        service.opened(service.control)
        tensors = await read_tensors(request)
        if file == 0:
            upload.drop()
            upload = CheckpointUpload()
        if file != len(upload.files):
            tensors.close()
            raise RequestError(f"received file {file}, but expected file {len(upload.files)}", code="invalid_value")
        upload.add(tensors)
        return Response(status_code=204)

    return router


async def _connect(service: Service, address: TransferAddress, *, connecting: set[object]) -> None:
    """Connects the engine to another worker. Raises RequestError if that is not possible."""
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
