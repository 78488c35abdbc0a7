"""The routes with which a trainer gives the server new weights (`--rl`), as vLLM and prime-rl name them.

    POST /pause               groups under way end where they are, are waited for, or are kept (`mode`); new ones wait
    POST /update_weights      all engines get new weights, or none does
    POST /resume              groups go on, under the new weights

An update needs no pause: groups under way then go on at once.
"""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from motet.api.answer import json_response
from motet.api.caller import new_router
from motet.api.schemas.shared import MAX_VERSION_CHARS, Schema
from motet.api.service import Service, Weights
from motet.errors import NotFoundError
from motet.types import PauseMode


class NewWeights(Schema):
    """The body of /update_weights."""

    weight_dir: Annotated[str, Field(min_length=1)]
    """A folder that this server can read, with safetensors files: all tensors of the model, or some."""
    weight_version: Annotated[str | None, Field(min_length=1, max_length=MAX_VERSION_CHARS)] = None
    """What the weights are called from now on; by default the number of updates."""


class Aborted(Schema):
    """The body of /abort_requests."""

    request_ids: list[str] | None = None
    """The `x-request-id` of each request to end; none or an empty list: all."""


def rollout_router(service: Service) -> APIRouter:
    router = new_router()

    @router.post("/pause")
    async def pause(mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> Response:
        """Returns once no engine computes anything. `clear_cache` is vLLM's, and means nothing here: KV of old weights
        is never found, and that of the present ones stays right."""
        await weights_of(service).pause(mode)
        return json_response({"status": "paused"})

    @router.post("/abort_requests")
    async def abort_requests(body: Aborted | None = None) -> Response:
        ids = body.request_ids if body is not None else None
        return json_response({"status": "aborted", "aborted": await weights_of(service).abort(ids or None)})

    @router.post("/resume")
    async def resume() -> Response:
        await weights_of(service).resume()
        return json_response({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> Response:
        return json_response({"is_paused": weights_of(service).paused})

    @router.post("/update_weights")
    async def update_weights(body: NewWeights) -> Response:
        """Groups under way go on with the new weights, and their KV is computed anew."""
        version = await weights_of(service).update(Path(body.weight_dir), body.weight_version)
        return json_response({"message": "Weights updated", "weight_version": version})

    @router.get("/weight_info")
    async def weight_info() -> Response:
        return json_response({"weight_version": weights_of(service).version})

    return router


def weights_of(service: Service) -> Weights:
    """Raises NotFoundError unless these routes are open here."""
    if not service.config.rl:
        raise NotFoundError("This route is closed: start the server with --rl.", code="rl_off")
    if service.weights is None:
        raise NotFoundError("The engines of this server are elsewhere: ask their own servers.", code="no_engines_here")
    return service.weights
