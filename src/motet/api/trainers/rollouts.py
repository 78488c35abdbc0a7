"""The routes with which a trainer stops the groups under way and lets them go on (`--rl`), in vLLM's words.

POST /pause               groups under way end where they are, are waited for, or are kept (`mode`); new ones wait
POST /resume              groups go on, under the weights that are there by then (`api.trainers.weight_routes`)
POST /abort_requests      groups end where they are, and others come
POST /reset_prefix_cache  nothing that was cached is found any more
"""

from fastapi import APIRouter, Response

from motet.api.http.routes import json_response, new_router
from motet.api.http.schema import Schema
from motet.api.service import Service
from motet.types import PauseMode


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
        await service.opened(service.weights).pause(mode)
        return json_response({"status": "paused"})

    @router.post("/abort_requests")
    async def abort_requests(body: Aborted | None = None) -> Response:
        ids = body.request_ids if body is not None else None
        return json_response({"status": "aborted", "aborted": await service.opened(service.weights).abort(ids or None)})

    @router.post("/resume")
    async def resume() -> Response:
        await service.opened(service.weights).resume()
        return json_response({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> Response:
        return json_response({"is_paused": service.opened(service.weights).paused})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> Response:
        """Always succeeds: blocks that groups hold stay theirs, and nobody finds them. `reset_external` is vLLM's, and
        means nothing here: there is no other cache."""
        await service.opened(service.weights).forget_prefixes(anew=reset_running_requests)
        return json_response({"success": True})

    return router
