"""A cell on Ray Serve returns the answers and errors of one server, for both kinds of ingress."""

from functools import partial

import pytest

from tests.fault.answers import Body, fetch_answer
from tests.fault.fault_requests import CHAT, COMPLETIONS, COUNTED, chat, completion
from tests.fault.oracle import Undisturbed
from tests.ray.running_ray import RunningRay
from tests.ray.streaming import LONGEST, streaming

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat("a", COUNTED, n=8, logprobs=True, top_logprobs=2)),
        (CHAT, chat("b", n=1)),
        (COMPLETIONS, completion("c", COUNTED, n=1, logprobs=1)),
        (COMPLETIONS, completion("d", n=8, return_token_ids=True)),
    ],
    ids=["chat-streamed-8", "chat-1", "completion-streamed-1", "completion-8"],
)
async def test_an_answer_equals_that_of_one_server_with_one_prefill_and_one_transfer(
    route: str, body: Body, ray: RunningRay, undisturbed: Undisturbed
) -> None:
    expected = await undisturbed.answer(route, body)
    before = await ray.totals()
    assert await fetch_answer(ray.http, route, body) == expected
    after = await ray.totals()
    assert (after.prefills - before.prefills, after.transfers - before.transfers) == (1, 1)


async def test_an_error_before_the_first_byte_keeps_its_status_and_is_complete_json(ray: RunningRay) -> None:
    cases: list[tuple[int, str | None, Body, dict[str, str]]] = [
        (400, "top_p", chat("x", COUNTED, top_p=3.0), {}),
        (404, "model", chat("x", model="another"), {}),
        (401, None, chat("x"), {"Authorization": "Bearer wrong"}),
        (413, None, chat("x" * 200_000), {}),
    ]
    for status, param, body, headers in cases:
        answer = await ray.http.post(CHAT, json=body, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
        assert answer.json()["error"]["param"] == param


async def test_a_client_that_leaves_during_a_stream_frees_everything(ray: RunningRay) -> None:
    left = partial(ray.metric, "motet:groups_total", status="499")
    before = await left()
    async with streaming(ray, CHAT, chat("leaves", COUNTED, n=32, max_tokens=LONGEST)):
        pass
    await ray.until_idle()
    assert await left() == before + 1, "it was generated to its end"


async def test_ids_of_requests_and_sessions_reach_the_workers(ray: RunningRay) -> None:
    names = {"x-request-id": "named-by-the-client", "x-session-id": "a-session"}
    workers = set()
    for turn in range(4):
        answer = await ray.http.post(CHAT, json=chat(f"turn {turn}", max_tokens=4), headers=names)
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == ["named-by-the-client"]
        workers.add(answer.headers["x-motet-worker"])
    assert len(workers) == 1, "the session changed its worker"
    (prefill,) = ray.replicas("prefill")
    assert "(named-by-the-client)" in ray.log_of(prefill)


async def test_an_answer_has_one_request_id_also_without_one_from_the_client(ray: RunningRay) -> None:
    """Serve generates request ids, too."""
    answer = await ray.http.post(CHAT, json=chat("unnamed", max_tokens=4))
    (name,) = answer.headers.get_list("x-request-id")
    (prefill,) = ray.replicas("prefill")
    assert f"({name})" in ray.log_of(prefill)
