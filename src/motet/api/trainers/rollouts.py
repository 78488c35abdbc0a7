"""The routes with which a trainer stops running groups and lets them continue (`--rl`), in vLLM's words.

POST /pause               running groups end where they are, are waited for, or are kept (`mode`); new groups wait
POST /resume              groups continue, with the weights of that moment (`api.trainers.weight_routes`)
POST /abort_requests      groups end where they are, and other groups are let in
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
        """Returns as soon as no engine computes anything. `clear_cache` is vLLM's, and has no effect here: KV of other
        weights is never found, and KV of the present weights stays valid."""
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
        """Always succeeds: running groups keep their blocks, and no group finds them. `reset_external` is vLLM's, and
        has no effect here: there is no other cache."""
        await service.opened(service.control).forget_prefixes(recompute=reset_running_requests)
        return json_response({"success": True})

    return router
