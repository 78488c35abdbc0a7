"""`/engine/weights`: a gateway gives the engines of this server new weights, in two steps (`engines.wire`). Open to the
worker key, and only with `--rl`."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from motet.api.http.body_limit import is_tensors
from motet.api.http.routes import new_router
from motet.api.service import Service
from motet.api.trainers.incoming_weights import MAX_PIECES, read_tensors
from motet.api.worker.engine_routes import msgpack_response, read_body
from motet.engines.wire import WeightOrder, WeightVersion
from motet.errors import RequestError
from motet.models.checkpoint import Checkpoint, MemoryFile

Piece = Annotated[int, Query(ge=0, lt=MAX_PIECES)]
Total = Annotated[int, Query(ge=1, le=MAX_PIECES)]


class CheckpointUpload:
    """The files of one checkpoint, which come one by one."""

    def __init__(self) -> None:
        self._files: list[MemoryFile] = []

    def add(self, file: MemoryFile, piece: int) -> None:
        """The first piece forgets what a checkpoint before has left. Raises RequestError for one out of order."""
        if piece == 0:
            self.take().close()
        if piece != len(self._files):
            file.close()
            raise RequestError(f"piece {piece} comes where piece {len(self._files)} was expected", code="invalid_value")
        self._files.append(file)

    def take(self) -> Checkpoint:
        """Returns what has come."""
        checkpoint = Checkpoint.of_memory(self._files)
        self._files.clear()
        return checkpoint


def engine_weight_router(service: Service) -> APIRouter:
    router = new_router("/engine/weights", told=False)
    pieces = CheckpointUpload()

    @router.post("")
    async def prepare(request: Request, piece: Piece = 0, *, of: Total = 1) -> Response:
        weights = service.opened(service.weights)
        if is_tensors(request.headers):
            pieces.add(await read_tensors(request), piece)
            if piece < of - 1:
                return Response(status_code=204)
            checkpoint = pieces.take()
        else:
            order = await read_body(request, WeightOrder)
            checkpoint = Checkpoint(order.kind, tuple(map(Path, order.paths)))
        return msgpack_response(await weights.prepare_weights(checkpoint))

    @router.post("/apply")
    async def apply(request: Request) -> Response:
        weights = service.opened(service.weights)
        order = await read_body(request, WeightVersion)
        await weights.apply_weights(order.version, digest=order.digest)
        return msgpack_response(service.only_model().engine.info)

    @router.post("/name")
    async def name(request: Request) -> Response:
        weights = service.opened(service.weights)
        await weights.rename((await read_body(request, WeightVersion)).version)
        return Response(status_code=204)

    @router.get("/sums")
    async def sums() -> Response:
        return msgpack_response(await service.opened(service.weights).checksums())

    @router.post("/drop")
    async def drop(digest: str = "") -> Response:
        service.opened(service.weights).drop_weights(digest)
        return Response(status_code=204)

    @router.post("/hold")
    async def hold(held: bool) -> Response:
        await service.opened(service.weights).hold(held)
        return Response(status_code=204)

    @router.post("/forget")
    async def forget(anew: bool) -> Response:
        await service.opened(service.weights).forget_prefixes(anew=anew)
        return Response(status_code=204)

    return router
