"""Decode replicas that serve clients directly: the choice of the replica in Serve's proxy."""

import asyncio
from itertools import count

import httpx
import pytest

from motet.settings.ray_config import Ingress
from tests.fault.fault_requests import CHAT, STREAMED, chat
from tests.patience import PATIENCE_S
from tests.ray.processes import engine_of, stopped
from tests.ray.running_ray import RunningRay
from tests.ray.streaming import LONGEST, streaming

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.parametrize("shared", [Ingress.DIRECT], indirect=True, scope="session"),
]

MANY = 32
FEW = 7
STEP_S = 5.0


async def post(ray: RunningRay, name: str, *, session: str = "", header: str = "X-Session-ID") -> None:
    headers = {header: session} if session else {}
    answer = await ray.http.post(CHAT, json=chat(name, max_tokens=60), headers=headers)
    assert answer.status_code == httpx.codes.OK


async def test_load_is_counted_in_choices(ray: RunningRay) -> None:
    """One replica has a single request with many choices, and its engine is stopped, so that a request which goes there
    is not answered. When the replica has reported its choices to the proxy, all requests go to the other replica."""
    busy = await ray.home_of("busy")
    many = chat("many", STREAMED, n=MANY, max_tokens=LONGEST)
    async with streaming(ray, CHAT, many, session="busy"), asyncio.timeout(PATIENCE_S):
        with stopped(engine_of(busy)):
            for attempt in count(1):
                if await all_answered(ray, f"attempt {attempt}", limit_s=attempt * STEP_S):
                    break


async def all_answered(ray: RunningRay, name: str, *, limit_s: float) -> bool:
    """Sends a few requests at the same time. Returns False if not all are answered within the limit, and then cancels
    the others. Requests of one choice cannot all go to one replica unless the load of the other one is known."""
    posts = [asyncio.create_task(post(ray, f"{name}, request {number}")) for number in range(FEW)]
    done, open = await asyncio.wait(posts, timeout=limit_s)
    for task in open:
        task.cancel()
    await asyncio.gather(*done)
    await asyncio.gather(*open, return_exceptions=True)
    return not open


async def test_a_session_stays_at_its_replica(ray: RunningRay) -> None:
    """The second header is one that Serve itself does not read."""
    for header in ("X-Session-ID", "x-dynamo-session-id"):
        before = await ray.finished()
        for number in range(6):
            await post(ray, f"turn {number}", session=f"of-{header}", header=header)
        assert list((await ray.finished_since(before, choices=6)).values()) == [6]
