"""The routes that free the engines' memory temporarily for a trainer on the same machine (`--rl`), as in vLLM.

POST /sleep                 pauses the engines and releases the KV cache, at level 2 the weights too
POST /wake_up               allocates the memory of `tags` again, or all of it; then groups continue
"""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from motet.api.http.routes import json_response, new_router
from motet.api.service import Service
from motet.control.cell_sleep import CellSleep, SleepTag
from motet.types import PauseMode

MAX_LEVEL = 2


def sleep_router(service: Service) -> APIRouter:
    router = new_router()

    def opened() -> CellSleep:
        return service.opened(service.opened(service.control).sleep)

    @router.post("/sleep")
    async def sleep(
        level: Annotated[int, Query(ge=0, le=MAX_LEVEL)] = 1, mode: PauseMode = PauseMode.ABORT
    ) -> Response:
        """Returns as soon as the memory is released."""
        await opened().sleep(level, mode)
        return json_response({"status": "sleeping", "level": level})

    @router.post("/wake_up")
    async def wake_up(tags: Annotated[list[SleepTag] | None, Query()] = None) -> Response:
        awake = await opened().wake(tags or ())
        return json_response({"status": "awake" if awake else "sleeping", "tags": tags})

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        """True during a pause too, as in vLLM: nothing is computed."""
        return json_response({"is_sleeping": opened().asleep})

    return router
