"""SGLang's routes for trainers (`--rl`), in its shapes: other names for the routes in `api.trainers`."""

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from motet.api.control_bodies import ControlBody, options_in
from motet.api.http.routes import json_response, new_router
from motet.api.service import Service
from motet.api.sglang.sglang_schema import SglangAbort, SglangContinue, SglangPause, SglangWeights
from motet.api.trainers.weight_routes import update_engines
from motet.models.checkpoint import Checkpoint
from motet.types import PauseMode

PAUSES = {"abort": PauseMode.ABORT, "in_place": PauseMode.KEEP, "retract": PauseMode.KEEP}


def sglang_router(service: Service) -> APIRouter:
    router = new_router()
    _add_weights(router, service)
    _add_figures(router, service)
    return router


def _add_weights(router: APIRouter, service: Service) -> None:
    @router.post("/abort_request")
    async def abort_request(body: SglangAbort) -> Response:
        traces = None if body.abort_all else [body.rid]
        return json_response({"status": "aborted", "aborted": await service.opened(service.control).abort(traces)})

    @router.post("/pause_generation")
    async def pause_generation(body: SglangPause | None = None) -> Response:
        await service.opened(service.control).pause(PAUSES[(body or SglangPause()).mode])
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    @router.post("/continue_generation")
    async def continue_generation(body: SglangContinue | None = None) -> Response:
        await service.opened(service.control).resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: SglangWeights) -> Response:
        control = service.opened(service.control)
        if body.abort_all_requests:
            await control.abort(None)
        checkpoint = Checkpoint.of(Path(body.model_path))
        update = await update_engines(service, checkpoint, version=body.weight_version, field="model_path")
        message = f"Succeeded to update model weights. Weight version updated to {update.version}."
        return json_response({"success": True, "message": message, "num_paused_requests": 0})

    @router.get("/flush_cache", response_class=PlainTextResponse)
    async def get_flush_cache() -> Response:
        """Empties the prefix cache. It never fails, since running groups keep their KV."""
        await service.opened(service.control).forget_prefixes(recompute=False)
        return Response("Cache flushed.\n", media_type="text/plain")

    @router.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache(body: ControlBody | None = None) -> Response:
        service.opened(service.control)
        options_in(body, service)
        return await get_flush_cache()


def _add_figures(router: APIRouter, service: Service) -> None:
    @router.get("/get_weight_version")
    async def get_weight_version() -> Response:
        return json_response({"weight_version": service.opened(service.control).weights.version})

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> Response:
        version, served = service.opened(service.control).weights.version, service.only_model()
        paths = {"model_path": served.source, "tokenizer_path": served.source}
        return json_response(
            {**paths, "is_generation": True, "preferred_sampling_params": None, "weight_version": version}
        )

    @router.get("/v1/loads")
    async def loads() -> Response:
        """Returns the number of open groups. A trainer polls it until all groups that it aborted have ended."""
        service.opened(service.control)
        waiting, open_groups = service.admission.waiting, service.admission.open
        load = {"num_running_reqs": open_groups - waiting, "num_waiting_reqs": waiting, "num_total_reqs": open_groups}
        return json_response({"loads": [load]})
