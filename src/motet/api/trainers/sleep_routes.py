"""The routes with which a trainer on the same machine gets the engines' memory for a while (`--rl`), in vLLM's words.

POST /sleep                 a pause in which engines give back the KV cache, at level 2 the weights too
POST /wake_up               memory is taken again, all or that of `tags`; when all is there, groups go on
"""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from motet.api.http.routes import json_response, new_router
from motet.api.service import Service, Sleep
from motet.engine import SleepTag
from motet.types import PauseMode

DEEPEST = 2


def sleep_router(service: Service) -> APIRouter:
    router = new_router()

    @router.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=0, le=DEEPEST)] = 1, mode: PauseMode = PauseMode.ABORT) -> Response:
        """Returns once the memory is given back."""
        await _engines(service).sleep(level, mode)
        return json_response({"status": "sleeping", "level": level})

    @router.post("/wake_up")
    async def wake_up(tags: Annotated[list[SleepTag] | None, Query()] = None) -> Response:
        awake = await _engines(service).wake(tags or ())
        return json_response({"status": "awake" if awake else "sleeping", "tags": tags})

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        """True during a pause too, as in vLLM: nothing is computed."""
        return json_response({"is_sleeping": _engines(service).asleep})

    return router


def _engines(service: Service) -> Sleep:
    return service.opened(service.sleep)
