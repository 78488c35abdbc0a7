"""The routes with which a trainer pauses and resumes generation (`--rl`), as in vLLM.

POST /pause               running groups are aborted, finish first, or are kept (`mode`); new groups wait
POST /resume              groups continue, with the weights that serve then (`api.trainers.weight_routes`)
POST /abort_requests      aborts groups; other groups continue, and new groups are admitted
POST /reset_prefix_cache  empties the prefix caches
"""

from fastapi import APIRouter, Response

from motet.api.http.routes import json_response, new_router
from motet.api.http.schema import Schema
from motet.api.service import Service
from motet.types import PauseMode


class AbortBody(Schema):
    """The body of /abort_requests."""

    request_ids: list[str] | None = None
    """The `x-request-id` of each request to end. None or an empty list: all requests."""


def rollout_router(service: Service) -> APIRouter:
    router = new_router()

    @router.post("/pause")
    async def pause(mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> Response:
        """Returns as soon as no engine computes anything. `clear_cache` is a parameter of vLLM without effect in Motet:
        the prefix cache never returns KV of other weights, and KV of the current weights stays valid."""
        await service.opened(service.control).pause(mode)
        return json_response({"status": "paused"})

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody | None = None) -> Response:
        ids = body.request_ids if body is not None else None
        return json_response({"status": "aborted", "aborted": await service.opened(service.control).abort(ids or None)})

    @router.post("/resume")
    async def resume() -> Response:
        await service.opened(service.control).resume()
        return json_response({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> Response:
        return json_response({"is_paused": service.opened(service.control).engines.paused})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> Response:
        """Always succeeds: running groups keep their blocks, but no other group can reuse them. `reset_external` is a
        parameter of vLLM without effect in Motet, which has no external cache."""
        await service.opened(service.control).forget_prefixes(recompute=reset_running_requests)
        return json_response({"success": True})

    return router
