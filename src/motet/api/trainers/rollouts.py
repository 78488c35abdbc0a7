"""The routes with which a trainer pauses and resumes generation, and frees the engines' memory temporarily (`--rl`), as
in vLLM.

POST /pause               running groups are aborted, finish first, or are kept (`mode`); new ones get 503 or wait
POST /resume              groups continue, with the weights that serve then (`api.trainers.weight_routes`)
POST /abort_requests      aborts groups; other groups continue, and new groups are admitted
POST /reset_prefix_cache  empties the prefix caches
POST /sleep               pauses the engines and releases the KV cache, at level 2 the weights too
POST /wake_up             allocates the memory of `tags` again, or all of it; then groups continue
"""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from motet.api.control_bodies import (
    MAX_LEVEL,
    ControlBody,
    PauseBody,
    ResetBody,
    SleepBody,
    WakeBody,
    options_in,
)
from motet.api.http.routes import json_response, new_router
from motet.api.http.schema import Schema
from motet.api.service import Service
from motet.control.cell_sleep import CellSleep, SleepTag
from motet.control.engine_control import NewRequests
from motet.types import PauseMode


class AbortBody(Schema):
    """The body of /abort_requests."""

    request_ids: list[str] | None = None
    """The `x-request-id` of each request to end. None or an empty list: all requests."""


def rollout_router(service: Service) -> APIRouter:
    router = new_router()

    @router.post("/pause")
    async def pause(
        *,
        mode: PauseMode = PauseMode.ABORT,
        new_requests: NewRequests | None = None,
        clear_cache: bool = True,
        wait_for_inflight_requests: bool = False,
        body: PauseBody | None = None,
    ) -> Response:
        """Returns as soon as no engine computes anything. `clear_cache` is a parameter of vLLM without effect in Motet:
        the prefix cache never returns KV of other weights, and KV of the current weights stays valid.
        `wait_for_inflight_requests` is vLLM's old name of `mode=wait`."""
        control = service.opened(service.control)
        options = options_in(body, service)
        waits = options.get("wait_for_inflight_requests", wait_for_inflight_requests)
        mode = PauseMode.WAIT if waits else options.get("mode", mode)
        # A pause that keeps running groups also keeps new ones, as in vLLM.
        default = NewRequests.WAIT if mode is PauseMode.KEEP else NewRequests.REFUSE
        await control.pause(mode, options.get("new_requests", new_requests) or default)
        return json_response({"status": "paused"})

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody | None = None) -> Response:
        ids = body.request_ids or None if body is not None else None
        return json_response({"status": "aborted", "aborted": await service.opened(service.control).abort(ids)})

    @router.post("/resume")
    async def resume(body: ControlBody | None = None) -> Response:
        control = service.opened(service.control)
        options_in(body, service)
        await control.resume()
        return json_response({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> Response:
        return json_response({"is_paused": service.opened(service.control).engines.paused})

    @router.post("/reset_prefix_cache")
    @router.post("/clear_kv_blocks")  # Dynamo's name
    async def reset_prefix_cache(
        *, reset_running_requests: bool = False, reset_external: bool = False, body: ResetBody | None = None
    ) -> Response:
        """Always succeeds: running groups keep their blocks, but no other group can reuse them. `reset_external` is a
        parameter of vLLM without effect in Motet, which has no external cache."""
        control = service.opened(service.control)
        recompute = options_in(body, service).get("reset_running_requests", reset_running_requests)
        await control.forget_prefixes(recompute=recompute)
        return json_response({"success": True})

    return router


def sleep_router(service: Service) -> APIRouter:
    router = new_router()

    def sleep_control() -> CellSleep:
        return service.opened(service.opened(service.control).sleep)

    @router.post("/sleep")
    async def sleep(
        *,
        level: Annotated[int, Query(ge=0, le=MAX_LEVEL)] = 1,
        mode: PauseMode = PauseMode.ABORT,
        body: SleepBody | None = None,
    ) -> Response:
        """Returns as soon as the memory is released."""
        control, options = sleep_control(), options_in(body, service)
        level = options.get("level", level)
        await control.sleep(level, options.get("mode", mode))
        return json_response({"status": "sleeping", "level": level})

    @router.post("/wake_up")
    @router.post("/wakeup")  # LMDeploy's name
    async def wake_up(tags: Annotated[list[SleepTag] | None, Query()] = None, body: WakeBody | None = None) -> Response:
        control = sleep_control()
        tags = options_in(body, service).get("tags", tags)
        awake = await control.wake(tags or ())
        return json_response({"status": "awake" if awake else "sleeping", "tags": tags})

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        """True during a pause too, as in vLLM: nothing is computed."""
        return json_response({"is_sleeping": sleep_control().asleep})

    return router
