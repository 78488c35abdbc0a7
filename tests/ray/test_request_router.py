"""Decode replicas that serve clients themselves: which of them does Serve's proxy take?"""

import asyncio
from contextlib import ExitStack

import httpx
import msgspec
import psutil
import pytest

from motet.types import Ingress
from tests.fault.asked import CHAT, STREAMED, chat
from tests.patience import PATIENCE_S
from tests.ray.asking import LONGEST
from tests.ray.processes import engine_of, stopped
from tests.ray.running_ray import RunningRay, eventually_in

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.parametrize("shared", [Ingress.DIRECT], indirect=True, scope="session"),
]

MANY = 32


async def short(ray: RunningRay, name: str, **headers: str) -> None:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await ray.http.post(CHAT, json=chat(name, max_tokens=4), headers=names)
    assert answer.status_code == httpx.codes.OK


async def test_load_is_counted_in_choices(ray: RunningRay) -> None:
    """The engine that writes many choices stands still, so a request that goes there is not answered. Earlier tests had
    eight choices on the other one, which may have reported so a second ago: these are many more."""
    many = chat("many", STREAMED, n=MANY, max_tokens=LONGEST)
    before = await ray.finished()
    with ExitStack() as standing:
        async with ray.http.stream("POST", CHAT, json=many, headers={"X-Motet_Choices": str(MANY)}) as answer:
            lines = answer.aiter_lines()  # kept, since losing it would close the answer
            await anext(lines)
            busy = await writing(ray)
            standing.enter_context(stopped(engine_of(busy)))
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(short(ray, f"one {number}") for number in range(7)))
    since = await ray.finished_since(before, choices=7)
    assert [since[replica] for replica in since if replica != busy] == [7]


async def writing(ray: RunningRay) -> psutil.Process:
    """The one replica that writes; one that is too busy to say so in time is asked again."""
    found: list[psutil.Process] = []

    async def is_one() -> bool:
        found[:] = [replica for replica in ray.replicas("decode") if await writes(ray, replica)]
        return len(found) == 1

    await eventually_in(PATIENCE_S, is_one, lambda: f"these write: {found}")
    return found[0]


async def writes(ray: RunningRay, replica: psutil.Process) -> bool:
    workers = (await (await ray.own(replica)).get("/status")).json()["workers"]
    return any(worker.get("choices_running") for worker in workers)


async def test_a_session_stays_at_its_replica(ray: RunningRay) -> None:
    before = await ray.finished()
    for number in range(6):
        await short(ray, f"turn {number}", X_Session_ID="s")
    assert list((await ray.finished_since(before, choices=6)).values()) == [6]


async def test_an_invalid_header_is_ignored(ray: RunningRay) -> None:
    answer = await ray.http.post(CHAT, json=chat("x", max_tokens=4, n=2), headers={"x-motet-choices": "many"})
    assert len(msgspec.json.decode(answer.content)["choices"]) == 2
