"""API keys are isolated: no key learns of another key's prompts, or takes the capacity of its requests."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.api.serving import PROMPT, ROUTES, Served, Serving, WatchedEngine, every_route
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

ONE, OTHER = "one", "other"
KEYS = (ONE, OTHER)


async def send(served: Served, key: str | None, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await served.http.post(path, json={**ROUTES[path], **fields}, headers=headers)


def salts(served: Served) -> list[str]:
    return [request.cache_salt for request in served.engine.requests]


@every_route
async def test_keys_share_no_cached_prompts(serve: Serving, path: str) -> None:
    served = await serve(api_keys=KEYS)
    for key in (ONE, OTHER, ONE):
        assert (await send(served, key, path)).status_code == 200
    first, second, third = salts(served)
    assert first == third != second
    assert "" not in (first, second)


async def test_a_key_cannot_take_the_salt_of_another(serve: Serving) -> None:
    served = await serve(api_keys=KEYS)
    await send(served, ONE)
    await send(served, OTHER, cache_salt=salts(served)[0])
    await send(served, OTHER, cache_salt="a")
    await send(served, OTHER, cache_salt="b")
    assert len({*salts(served)}) == 4


async def test_servers_with_the_same_keys_find_the_same_blocks(serve: Serving) -> None:
    """Two gateways with the same workers can list their keys in different orders."""
    here, there = await serve(api_keys=KEYS), await serve(api_keys=KEYS[::-1])
    for served in (here, there):
        await send(served, ONE)
    assert salts(here) == salts(there)
    assert ONE not in salts(here)[0]


@pytest.mark.parametrize(
    ("settings", "salted"),
    [
        ({"api_keys": (ONE,)}, False),
        ({"api_keys": (ONE,), "cache_salt_per_key": "on"}, True),
        ({"api_keys": KEYS, "cache_salt_per_key": "off"}, False),
    ],
)
async def test_operators_can_set_whether_keys_share_cached_prompts(
    serve: Serving, settings: dict[str, Any], salted: bool
) -> None:
    served = await serve(**settings)
    await send(served, ONE)
    assert [bool(salt) for salt in salts(served)] == [salted]


@every_route
@pytest.mark.parametrize(
    ("key", "priority", "status"), [(ONE, -5, 200), (ONE, -6, 400), (OTHER, 0, 200), (OTHER, -1, 400), (OTHER, 9, 200)]
)
async def test_a_priority_is_limited_by_the_key(
    serve: Serving, path: str, key: str, priority: int, status: int
) -> None:
    served = await serve(api_keys=KEYS, key_priority=(f"{ONE}=-5",))
    answer = await send(served, key, path, priority=priority)
    assert answer.status_code == status
    if status == 400:
        assert_error(answer, status=400, param="priority")
    else:
        assert served.engine.requests[-1].priority == priority


@pytest.mark.parametrize("keys", [(), (ONE,)])
async def test_a_single_client_can_use_every_priority(serve: Serving, keys: tuple[str, ...]) -> None:
    served = await serve(api_keys=keys)
    assert (await send(served, ONE, priority=-7)).status_code == 200


async def test_a_request_that_fills_the_server_leaves_capacity_for_other_keys(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True), api_keys=KEYS, max_waiting_groups=8)
    greedy = await served.engine.start_request(send(served, ONE, prompt=[PROMPT] * 8))
    for _ in range(7):
        await served.engine.submitted.acquire()
    assert_error(await send(served, ONE), status=503, code="overloaded")
    assert_error(await send(served, OTHER, prompt=[PROMPT] * 5), status=503, code="overloaded")
    modest = await served.engine.start_request(send(served, OTHER, prompt=[PROMPT] * 4))
    for _ in range(3):
        await served.engine.submitted.acquire()
    assert_error(await send(served, OTHER), status=503, code="overloaded")
    served.service.admission.check()
    assert served.service.admission.waiting == 12
    served.engine.go(1000)
    assert [answer.status_code for answer in await asyncio.gather(greedy, modest)] == [200, 200]
