"""The routes that update the weights (`--rl`), as in vLLM.

    POST /update_weights        a folder, a file in another process's memory, or the tensors themselves: all engines
                                get the new weights, or none does
    several bodies              /start_weight_update, /update_weights for each body, /finish_weight_update
    POST /update_weight_version gives the weights another version
    POST /weight_checker        checksums, to compare with the trainer's own

An update needs no pause: without one, running groups continue at once."""

from pathlib import Path
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, JsonValue

from motet.api.control_bodies import ControlBody, StartUpdateBody, Version, options_in
from motet.api.http.body import is_tensors
from motet.api.http.failure import invalid_value
from motet.api.http.routes import json_response, new_router, with_body
from motet.api.http.schema import Schema
from motet.api.service import Service
from motet.api.tensor_bodies import read_tensors
from motet.api.trainers.trainer_group import InitInfo, UpdateInfo, join_group, leave_group, take_announced
from motet.control.checkpoint_upload import CheckpointUpload
from motet.control.weight_updates import WeightUpdate
from motet.engines.wire import INVALID_WEIGHTS
from motet.errors import ModelLoadError, RequestError
from motet.models.checkpoint import ZEROS, Checkpoint
from motet.models.memory_file import MemoryFile


class UpdateWeightsBody(Schema):
    """The body of /update_weights, if it is JSON."""

    weight_dir: Annotated[str | None, Field(min_length=1)] = None
    """A folder that this server can read, with safetensors files: all tensors of the model, or some."""
    weight_file: Annotated[str | None, Field(min_length=1)] = None
    """A sealed file in the memory of a process on this machine, /proc/PID/fd/FD, instead of a folder. On a system
    without such files, a temporary file of `motet.weights`."""
    update_info: UpdateInfo | None = None
    """The next tensors, between /start_weight_update and /finish_weight_update."""
    weight_version: Version | None = None
    """Name of the new version; None for the number of updates."""


class FinishUpdateBody(Schema):
    """The body of /finish_weight_update."""

    weight_version: Version | None = None


class WeightVersionBody(Schema):
    """The body of /update_weight_version."""

    new_version: Version


class InitTransferBody(Schema):
    """The body of /init_weight_transfer_engine."""

    init_info: InitInfo


class WeightCheckerBody(Schema):
    """The body of /weight_checker."""

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None
    """An earlier answer to `checksum`; for `compare`."""


def weight_router(service: Service) -> APIRouter:
    router = new_router()
    from_json = with_body(UpdateWeightsBody, lambda body, _: _take_json(service, body))

    @router.post("/update_weights")
    async def update_weights(request: Request, weight_version: Annotated[Version | None, Query()] = None) -> Response:
        """`weight_version`: for a body of tensors. Running groups continue with the new weights, and their KV is
        recomputed."""
        upload = service.opened(service.control).upload
        if not is_tensors(request.headers):
            return await from_json(request)
        file, names = await read_tensors(request, service.tensor_memory)
        if upload is not None:
            upload.add(file, names)
            return json_response({"message": "Weights updated"})
        return await _updated(service, Checkpoint.of_memory([file]), version=weight_version, field="body")

    @router.post("/update_weight_version")
    async def update_weight_version(body: WeightVersionBody) -> Response:
        await service.opened(service.control).weights.rename(body.new_version)
        return json_response({"success": True, "new_version": body.new_version})

    @router.get("/weight_info")
    async def weight_info() -> Response:
        return json_response({"weight_version": service.opened(service.control).weights.version})

    @router.post("/weight_checker")
    async def weight_checker(body: WeightCheckerBody) -> Response:
        """`checksum`: returns the SHA-256 of each tensor in the engines; `compare`: compares these with a `baseline`;
        `reset`: sets all tensors to zeros, so that a tensor that a later update omits is noticed."""
        weights = service.opened(service.control).weights
        if body.action == "reset":
            await weights.update(ZEROS, None)
            return json_response({"status": "reset"})
        if body.action == "compare" and body.baseline is None:
            raise invalid_value("baseline", "action 'compare' needs the checksums to compare with")
        sums = await weights.checksums()
        if body.baseline is None:
            return json_response({"checksums": sums})
        names = sums.keys() | body.baseline.keys()
        mismatches = sorted(name for name in names if sums.get(name) != body.baseline.get(name))
        return json_response({"match": not mismatches, "mismatches": mismatches})

    return router


def transfer_router(service: Service) -> APIRouter:
    """Makes the routes of an update in several bodies."""
    router = new_router()

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitTransferBody) -> Response:
        """Joins the group of a trainer that sends over NCCL, or refuses at once. Does nothing for a trainer that sends
        over HTTP."""
        service.opened(service.control)
        await join_group(service, body.init_info)
        return json_response({"message": "Weight transfer initialized"})

    @router.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine(body: ControlBody | None = None) -> Response:
        service.opened(service.control)
        options_in(body, service)
        await leave_group(service)
        service.opened(service.control).drop_upload()
        return json_response({"message": "Weight transfer shut down"})

    @router.post("/start_weight_update")
    async def start_weight_update(body: StartUpdateBody | None = None) -> Response:
        control = service.opened(service.control)
        options_in(body, service)
        control.drop_upload()
        control.upload = CheckpointUpload()
        return json_response({"message": "Weight update started"})

    @router.post("/finish_weight_update")
    async def finish_weight_update(body: FinishUpdateBody | None = None) -> Response:
        control = service.opened(service.control)
        upload, control.upload = control.opened_upload(), None
        version = None if body is None else body.weight_version
        update = await update_engines(service, upload.finish(), version=version, field="body")
        return json_response({"message": "Weight update finished", **_fields(update)})

    return router


async def _take_json(service: Service, body: UpdateWeightsBody) -> Response:
    """Carries out an update with a JSON body. Raises RequestError unless the body names exactly one source."""
    ways = {name for name in ("weight_dir", "weight_file", "update_info") if getattr(body, name) is not None}
    if len(ways) != 1:
        why = "give one of 'weight_dir', 'weight_file' and 'update_info', or tensors as application/octet-stream"
        raise invalid_value("weight_dir", why)
    if body.update_info is not None:
        await take_announced(service, body.update_info)
        return json_response({"message": "Weights updated"})
    field, version = ways.pop(), body.weight_version
    if service.opened(service.control).upload is not None:
        why = "a weight update is open: until /finish_weight_update, tensors are accepted in bodies only"
        raise invalid_value(field, why)
    if body.weight_dir is not None:
        return await _updated(service, Checkpoint.of(Path(body.weight_dir)), version=version, field=field)
    try:
        file = await to_thread.run_sync(MemoryFile.opened, Path(body.weight_file or ""))
    except ModelLoadError as error:
        raise invalid_value(field, error.message) from error
    return await _updated(service, Checkpoint.of_memory([file]), version=version, field=field)


async def _updated(service: Service, checkpoint: Checkpoint, *, version: str | None, field: str) -> Response:
    update = await update_engines(service, checkpoint, version=version, field=field)
    return json_response({"message": "Weights updated", **_fields(update)})


async def update_engines(service: Service, checkpoint: Checkpoint, *, version: str | None, field: str) -> WeightUpdate:
    """Gives the engines new weights. `field`: the field of the request with the source of the weights. Raises
    RequestError, which names the field, if the engines cannot use the weights."""
    try:
        return await service.opened(service.control).weights.update(checkpoint, version)
    except RequestError as error:
        if error.code != INVALID_WEIGHTS:
            raise
        raise RequestError(f"Invalid '{field}': {error.message}.", param=field, code=error.code) from error


def _fields(update: WeightUpdate) -> dict[str, JsonValue]:
    slowest: dict[str, JsonValue] = {"worker": update.slowest, "seconds": round(update.seconds, 3)}
    return {"weight_version": update.version, "slowest": slowest}
