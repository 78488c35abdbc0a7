"""A cell on Ray Serve returns the answers and errors of one server, for both kinds of ingress."""

from functools import partial
from pathlib import Path

import pytest

from tests.error_response import assert_error
from tests.fault.answers import Body, fetch_answer
from tests.fault.fault_requests import CHAT, COMPLETIONS, COUNTED, chat, completion
from tests.fault.oracle import Undisturbed
from tests.ray.running_ray import ADMIN_KEY, RunningRay
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


async def test_adapters_are_served_by_name_and_a_gateway_loads_more(ray: RunningRay, folder: Path) -> None:
    """The bug: with direct ingress, one replica loaded the adapter, and requests on the others failed."""

    async def tokens(model: str) -> list[int]:
        answer = await ray.http.post(
            COMPLETIONS, json=completion("e", model=model, return_token_ids=True, max_tokens=20)
        )
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    base, poet = await tokens("tiny"), await tokens("poet")
    assert base != poet == await tokens("tiny:poet")
    cards = {card["id"]: card for card in (await ray.http.get("/v1/models")).json()["data"]}
    assert cards["poet"]["parent"] == "tiny"
    named, admin = {"lora_name": "late"}, {"Authorization": f"Bearer {ADMIN_KEY}"}
    late = named | {"lora_path": str(folder.parent / "poet")}
    loaded = await ray.http.post("/v1/load_lora_adapter", json=late, headers=admin)
    if ray.serves_directly:
        assert_error(loaded, status=404, code="no_adapters")
    else:
        assert loaded.status_code == 200 and await tokens("late") == poet
        assert (await ray.http.post("/v1/unload_lora_adapter", json=named, headers=admin)).status_code == 200


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
