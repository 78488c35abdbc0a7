"""Decode replicas behind HAProxy, and the router that tells HAProxy which of them has a prompt."""

from collections.abc import AsyncIterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from motet.deploy.ray.options import FORWARD_BODY, HAPROXY
from tests.fault.answers import Body, ask
from tests.fault.asked import CHAT, COMPLETIONS, COUNTED, TEXT, chat
from tests.fault.oracle import Undisturbed
from tests.patience import PATIENCE_S
from tests.ray.processes import tcp_addresses
from tests.ray.running_ray import RunningRay, eventually_in

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.ray]

FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
"""Files that HAProxy writes, beside those of Ray, which are removed."""
PORTS = range(30_000, 31_000)
"""Ports of the replicas' servers that HAProxy asks."""
QUICK_END = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}


@pytest.fixture(scope="module")
async def ray(folder: Path) -> AsyncIterator[RunningRay]:
    running = RunningRay(folder, "--prefix-router", ingress="direct", decode=2, max_model_len=1024)
    running.environ.update({name: str(running.temporary / "haproxy" / file) for name, file in FILES.items()})
    running.environ.update({HAPROXY: "1", FORWARD_BODY: "1", **QUICK_END})
    async with running:
        yield running


def asked(name: str) -> Body:
    """The prompt has 880 tokens. They weigh as much as nine open choices, more than the router is asked for here."""
    return {"prompt": f"{name}: {TEXT * 40}", "max_tokens": 2}


async def cached(ray: RunningRay, name: str) -> int:
    """Asks for a long prompt, and returns the number of its tokens that the replica had cached."""
    answer = await ray.http.post(COMPLETIONS, json=asked(name))
    assert answer.status_code == httpx.codes.OK
    return int(msgspec.json.decode(answer.content)["usage"]["prompt_tokens_details"]["cached_tokens"])


async def named(ray: RunningRay, name: str) -> psutil.Process:
    """Returns the replica that the router names for this prompt. It is asked as HAProxy asks it."""
    (router,) = ray.replicas("router")
    (url,) = {f"http://{ip}:{port}" for ip, port in tcp_addresses(router) if port in PORTS}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        answer = await http.post(f"{url}/internal/route", json=asked(name))
    return ray.replica_at(f":{answer.json()['port']}")


async def test_a_prompt_goes_to_the_replica_that_has_it(ray: RunningRay) -> None:
    """The order is not that of turns, by which three of five are found at most. The router learns a moment late what a
    replica has and that an answer is over; until then each reply counts as load there, and may send a prompt elsewhere.
    So the test asks as seldom as it can, and has three tries with new prompts."""
    names = map(str, count())
    for _ in range(3):
        homes: dict[psutil.Process, str] = {}
        while len(homes) < 2:  # until the router knows both replicas
            name, before = next(names), await ray.finished()
            assert await cached(ray, name) == 0
            (home,) = await ray.finished_since(before, choices=1)
            homes.setdefault(home, name)
        await eventually_in(PATIENCE_S, partial(learned, ray, homes), lambda: "it does not learn who has what")
        first, second = homes.values()
        if all([await cached(ray, name) > 0 for name in (second, second, first, first, second)]):
            return
    pytest.fail("prompts go to replicas that do not have them")


async def learned(ray: RunningRay, homes: Mapping[psutil.Process, str]) -> bool:
    """Returns True if the router names the home of each prompt."""
    return all([await named(ray, name) == home for home, name in homes.items()])


async def test_eight_streamed_choices_are_those_of_one_server(ray: RunningRay, undisturbed: Undisturbed) -> None:
    body = chat("whole", COUNTED, n=8, logprobs=True, top_logprobs=2)
    assert await ask(ray.http, CHAT, body) == await undisturbed.answer(CHAT, body)


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"no JSON", 400), (b'{"messages": []}', 400), (b'{"prompt": "x", "model": "other"}', 404)],
)
async def test_a_replica_reports_what_is_wrong_with_a_request(content: bytes, status: int, ray: RunningRay) -> None:
    route = COMPLETIONS if b"prompt" in content else CHAT
    answer = await ray.http.post(route, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, "error" in answer.json()) == (status, True)
