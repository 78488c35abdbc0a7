"""`group` for models on text upstreams: the server understands it, and ends and starts choices as requests."""

from typing import Any

import pytest

from motet.engines.upstream.upstream_server import UpstreamOptions
from tests.api.serving import chunks, next_chunk, streamed_or_not
from tests.api.text_models import TextGateway, TextServing, joined, texts_of
from tests.error_response import assert_error
from tests.peers.openai_script import CHAT, COMPLETIONS, Behaviour, FixedAnswer

pytestmark = pytest.mark.anyio

LAST_WORD_VALUE = {"regex": r".* w(\d)"}
"""Finds "0" with the seeds 5 and 9, "1" with 6, "2" with 7, and nothing with 4 and 8."""
AGREE = {"stop_when": {"agree": 2}, "extract": LAST_WORD_VALUE, "vote": True, "start": 1}
both_routes = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])


async def answered(gateway: TextGateway, path: str, **fields: object) -> dict[str, Any]:
    """Returns an answer; a stream is joined. `ends`: finish reasons by choice."""
    body = gateway.body(**fields) if path == CHAT else {"model": "texts", "prompt": "hi", **fields}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    response = await gateway.served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    shown = chunks(response) if body.get("stream") else [response.json()]
    each = [choice for chunk in shown for choice in chunk["choices"]]
    ends = {choice["index"]: choice["finish_reason"] for choice in each if choice["finish_reason"]}
    answer = joined(shown) if body.get("stream") else shown[0]
    reports = [chunk["groups"] for chunk in shown if "groups" in chunk]
    return {**answer, "ends": ends, "groups": reports[0] if reports else None}


@both_routes
@streamed_or_not
async def test_choices_start_until_the_answers_agree(serve_texts: TextServing, path: str, stream: bool) -> None:
    gateway = await serve_texts(Behaviour())
    received = gateway.peers[0].requests
    plain = await answered(gateway, path, n=8, seed=5, stream=stream)
    received.clear()
    steered = await answered(gateway, path, n=8, seed=5, stream=stream, group=AGREE)
    assert texts_of(steered) == texts_of(plain)[:5]
    assert steered["ends"] == dict.fromkeys(range(5), "stop")
    assert [one.body["seed"] for one in received] == [5, 6, 7, 8, 9]
    assert not any("group" in one.body or "n" in one.body for one in received)
    assert steered["groups"] == [
        {
            "id": steered["id"],
            "n": 8,
            "begun": 5,
            "finished": 5,
            "aborted": 0,
            "stopped_by": "agree",
            "vote": {"majority": "0", "count": 2, "values": {"0": "0", "1": "1", "2": "2", "3": None, "4": "0"}},
        }
    ]
    words = 3 + 4 + 5 + 2 + 3
    assert (steered["usage"]["prompt_tokens"], steered["usage"]["completion_tokens"]) == (2, words)
    assert gateway.fleet.members[0].load.open_choices == 0


@both_routes
@streamed_or_not
async def test_choices_that_are_not_needed_are_ended_on_the_server(
    serve_texts: TextServing, path: str, stream: bool
) -> None:
    gateway = await serve_texts(Behaviour(hangs=frozenset({5, 6})))
    answer = await answered(gateway, path, n=3, seed=4, stream=stream, group={"stop_when": {"finished": 1}})
    assert answer["ends"] == {0: "stop", 1: "abort", 2: "abort"}
    assert texts_of(answer)[0] == "hi 4"
    assert stream or texts_of(answer)[1:] == ["", ""]
    assert answer["usage"] is None
    (shown,) = answer["groups"]
    assert (shown["begun"], shown["finished"], shown["aborted"], shown["stopped_by"]) == (3, 1, 2, "finished")
    await gateway.peers[0].until_idle()
    metrics = await gateway.served.metrics()
    assert 'motet:request_success_total{finished_reason="abort",model_name="texts"} 2.0' in metrics


async def test_each_choice_has_a_role_once_even_if_it_is_ended_before_it_has_started(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(hangs=frozenset({5})), options=UpstreamOptions(max_singles=2))
    response = await gateway.chat(n=4, seed=4, stream=True, group={"stop_when": {"finished": 1}})
    deltas = [choice for chunk in chunks(response) for choice in chunk["choices"]]
    assert sorted(choice["index"] for choice in deltas if "role" in choice["delta"]) == [0, 1, 2, 3]
    assert not any("content" in choice["delta"] for choice in deltas if choice["finish_reason"] == "abort")


async def test_choices_that_were_ended_are_omitted_on_request(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(hangs=frozenset({4, 6})))
    group = {"stop_when": {"finished": 2}, "keep": "finished"}
    answer = (await gateway.chat(n=4, seed=4, group=group)).json()
    assert [choice["index"] for choice in answer["choices"]] == [1, 3]
    assert answer["system_fingerprint"] == "fp"


@streamed_or_not
async def test_each_prompt_is_steered_by_itself(serve_texts: TextServing, stream: bool) -> None:
    gateway = await serve_texts(Behaviour())
    answer = await answered(gateway, COMPLETIONS, prompt=["a", "b"], n=9, seed=5, stream=stream, group=AGREE)
    assert texts_of(answer) == [f"{p} {rest}" for p in "ab" for rest in ("5 w0", "6 w0 w1", "7 w0 w1 w2", "8", "9 w0")]
    assert sorted(answer["ends"]) == [0, 1, 2, 3, 4, 9, 10, 11, 12, 13]
    assert [(shown["id"], shown["begun"]) for shown in answer["groups"]] == [
        (f"{answer['id']}-{at}", 5) for at in (0, 1)
    ]
    assert answer["usage"]["prompt_tokens"] == 2


async def test_a_choice_that_starts_later_is_sent_again_where_it_was_refused(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(), Behaviour())
    for peer in gateway.peers:
        peer.behaviour.next_errors = [FixedAnswer(503)]
    assert_error(await gateway.chat(n=2, seed=4, group={"start": 1}), status=503, code="overloaded")
    gateway.peers[0].behaviour.next_errors = [FixedAnswer(503)]
    answer = (await gateway.chat(n=2, seed=4, group={"start": 1})).json()
    assert texts_of(answer) == ["hi 4", "hi 5 w0"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"group": {"deterministic": True}}, "group.deterministic"),
        ({"group": {"confidence": {"window": 8, "below": 1}}}, "group.confidence"),
        ({"group": {"start": 5}}, "group.start"),
        ({"group": {"stop_when": {"agree": 2}}}, "group.extract"),
        ({"group": {"unheard_of": 1}}, "group.unheard_of"),
        ({"group": {"keep": "finished"}, "stream": True}, "group.keep"),
        ({"group": {}, "best_of": 5}, "best_of"),
        ({"group": []}, "group"),
    ],
    ids=str,
)
async def test_fields_that_need_tokens_and_invalid_fields_are_refused_by_name(
    serve_texts: TextServing, fields: dict[str, object], param: str
) -> None:
    gateway = await serve_texts(Behaviour())
    assert_error(await gateway.complete(n=4, **fields), status=400, param=param)
    assert gateway.peers[0].requests == []


async def test_a_client_inspects_its_group_and_ends_choices_of_it(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(hangs=frozenset({4, 5, 6})))
    peer, http = gateway.peers[0], gateway.served.http
    peer.close_gate().release()
    body = gateway.body(n=4, seed=4, stream=True, group={"start": 2})
    async with http.stream("POST", CHAT, json=body) as response:
        lines = response.aiter_lines()
        first = await next_chunk(lines)
        path = f"/v1/groups/{first['id']}"
        shown = (await http.get(path)).json()
        assert (shown["state"], shown["prompt_tokens"]) == ("writing", None)
        states = ["writing", "writing", "waiting", "waiting"]
        assert shown["choices"] == [
            {"index": index, "state": state, "tokens": None, "finish_reason": None, "worker": None}
            for index, state in enumerate(states)
        ]
        assert_error(await http.post(f"{path}/more", json={"n": 1}), status=400, param="n")
        for index, ended in ((3, True), (0, True), (0, False), (3, False)):
            assert (await http.delete(f"{path}/choices/{index}")).json()["ended"] is ended
        for _ in range(3):  # another choice has started
            await peer.arrived.acquire()
        shown = (await http.get(path)).json()
        assert [one["state"] for one in shown["choices"]] == ["over", "writing", "writing", "dropped"]
        assert_error(await http.delete(f"{path}/choices/4"), status=404, code="choice_not_found")
        await http.delete(path)
        ends: dict[int, str] = {}
        while shown := await next_chunk(lines):
            ends |= {one["index"]: one["finish_reason"] for one in shown["choices"] if one["finish_reason"]}
            report = shown.get("groups")
    assert ends == {0: "abort", 1: "abort", 2: "abort"}
    assert report is not None and (report[0]["begun"], report[0]["aborted"]) == (3, 3)
    await peer.until_idle()
    assert_error(await http.get(path), status=404, code="group_not_found")
