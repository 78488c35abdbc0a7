"""Decode replicas behind HAProxy, and the router that it asks which of them has a prompt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from motet.deploy.ray.direct_ingress import FORWARD_BODY, HAPROXY
from tests.fault.answers import ask
from tests.fault.asked import CHAT, COMPLETIONS, COUNTED, TEXT, chat
from tests.fault.oracle import Undisturbed
from tests.ray.running_ray import RunningRay

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.ray]

FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
"""What HAProxy writes, beside the files of Ray, which are removed."""
REPORTED_S = 1.2
"""Once a second a replica tells the router what is open there; until then what it was given counts."""
QUICK_END = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}


@pytest.fixture(scope="module")
async def ray(folder: Path) -> AsyncIterator[RunningRay]:
    running = RunningRay(folder, "--prefix-router", ingress="direct", decode=2)
    running.environ.update({name: str(running.temporary / "haproxy" / file) for name, file in FILES.items()})
    running.environ.update({HAPROXY: "1", FORWARD_BODY: "1", **QUICK_END})
    async with running:
        yield running


async def cached(ray: RunningRay, name: str) -> int:
    """Prompt tokens that the replica had, when it was asked for a long prompt."""
    body = {"prompt": f"{name}: {TEXT * 12}", "max_tokens": 2}
    answer = await ray.http.post(COMPLETIONS, json=body)
    assert answer.status_code == httpx.codes.OK
    return int(msgspec.json.decode(answer.content)["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_prompt_goes_to_the_replica_that_has_it(ray: RunningRay) -> None:
    """In an order that is not that of turns."""
    had = [await cached(ray, "a") > 0]
    for name in "bbaab":
        await asyncio.sleep(REPORTED_S)  # the one before is over, which the router learns with the next report only
        had.append(await cached(ray, name) > 0)
    assert had == [False, False, True, True, True, True]


async def test_eight_streamed_choices_are_those_of_one_server(ray: RunningRay, undisturbed: Undisturbed) -> None:
    body = chat("whole", COUNTED, n=8, logprobs=True, top_logprobs=2)
    assert await ask(ray.http, CHAT, body) == await undisturbed.answer(CHAT, body)


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"no JSON", 400), (b'{"messages": []}', 400), (b'{"prompt": "x", "model": "other"}', 404)],
)
async def test_what_is_wrong_with_a_request_is_told_by_a_replica(content: bytes, status: int, ray: RunningRay) -> None:
    route = COMPLETIONS if b"prompt" in content else CHAT
    answer = await ray.http.post(route, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, "error" in answer.json()) == (status, True)
