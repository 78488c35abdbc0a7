"""Traces of requests: the spans, their attributes, and the context that is sent to the next server."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motet.tracing.spans import SpanRecord
from tests.api.serving import Serving, WatchedEngine, group_lines, saying
from tests.api.text_models import TextServing
from tests.peers.openai_script import Behaviour
from tests.tracing.recorded import RecordedTracer

pytestmark = pytest.mark.anyio

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
CHAT = "/v1/chat/completions"
SECRET = "the secret of the prompt"


def body(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET}], **fields}


async def test_a_request_has_a_span_for_itself_its_group_and_each_choice(
    serve: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tracer = RecordedTracer()
    served = await serve(tracer=tracer)
    answer = await served.http.post(CHAT, json=body(n=3, seed=-1, session_id="s"), headers=SAMPLED)
    request, group = tracer.one(f"POST {CHAT}"), tracer.one("chat tiny")
    assert (request.trace_id, request.parent_id, request.state) == (TRACE, SPAN, "a=1")
    assert request.attributes["motet.request_id"] == answer.headers["x-request-id"]
    assert tracer.children(request) == ["chat tiny"]
    usage = answer.json()["usage"]
    attributes = group.attributes
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert attributes["gen_ai.response.id"] == answer.json()["id"]
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",) * 3
    assert (attributes["gen_ai.request.choice.count"], attributes["gen_ai.request.seed"]) == (3, -1)
    assert attributes["gen_ai.conversation.id"] == "s"
    assert tracer.children(group) == ["choice"] * 3
    assert (
        sum(int(str(one.attributes["motet.choice.output_tokens"])) for one in group.children)
        == usage["completion_tokens"]
    )
    assert SECRET not in str(tracer.records)
    assert [line["trace_id"] for line in group_lines(caplog)] == [TRACE]


async def test_each_prompt_of_a_request_is_a_group_of_it(serve: Serving) -> None:
    tracer = RecordedTracer()
    served = await serve(tracer=tracer)
    await served.complete(["x", "y"], n=2)
    assert tracer.children(tracer.one("POST /v1/completions")) == ["text_completion tiny"] * 2
    assert len({one.trace_id for one in tracer.records}) == 1


async def test_a_refused_request_has_a_span_with_the_reason(serve: Serving) -> None:
    tracer = RecordedTracer()
    served = await serve(tracer=tracer, max_body_bytes=1000)
    post = served.http.post
    await post(CHAT, json=body(n=0))
    await post(CHAT, json=body(model="other"))
    await post(f"/v1/groups/{'x' * 5000}/more", json={"n": 1})
    await served.http.get(CHAT)
    await post(CHAT, json=body(user="x" * 2000))
    await post(CHAT, content=parts(), headers={"content-type": "application/json"})
    served.service.start_drain()
    await post(CHAT, json=body())
    assert [
        (
            one.name,
            attributes["http.response.status_code"],
            attributes["motet.error.code"],
            attributes["error.type"],
            one.error,
        )
        for one in tracer.records
        for attributes in [one.attributes]
    ] == [
        (f"POST {CHAT}", 400, "integer_below_min_value", None, ""),
        (f"POST {CHAT}", 404, "model_not_found", None, ""),
        ("POST /v1/groups/{id}/more", 404, "group_not_found", None, ""),
        (f"GET {CHAT}", 405, "method_not_allowed", None, ""),
        ("POST", 413, "request_too_large", None, ""),  # before its route was known
        (f"POST {CHAT}", 413, "request_too_large", None, ""),
        (f"POST {CHAT}", 503, "draining", "draining", "draining"),
    ]
    assert max(len(str(one.attributes["url.path"])) for one in tracer.records) < 300


async def parts() -> AsyncIterator[bytes]:
    yield b"x" * 1001


async def test_a_request_that_the_gate_refuses_has_no_span(serve: Serving) -> None:
    tracer = RecordedTracer()
    served = await serve(tracer=tracer, api_keys=["key"])
    page, key = {"origin": "http://other"}, {"authorization": "Bearer key"}
    for status, headers in ((401, {}), (401, {"authorization": "Bearer other"}), (403, key | {"host": "other"})):
        assert (await served.http.post(CHAT, json=body(), headers=headers)).status_code == status
    assert (await served.http.post(CHAT, content="{}", headers=key | page)).status_code == 400
    assert tracer.records == []


async def test_a_client_that_leaves_ends_its_spans(serve: Serving) -> None:
    tracer, engine = RecordedTracer(), WatchedEngine(saying("a long answer"), gated=True)
    served = await serve(engine=engine, tracer=tracer)
    task = await engine.start_request(served.http.post(CHAT, json=body(n=2, stream=True)))
    await served.abandon(task)
    group = tracer.one("chat tiny")
    assert (group.attributes["motet.status"], group.error) == (499, "")
    assert group.children == []  # no choice had started
    await served.status()  # the request has ended, too
    assert tracer.one(f"POST {CHAT}").attributes["http.response.status_code"] == 499


async def test_a_malformed_header_starts_a_new_trace_and_is_not_logged(
    serve: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    tracer = RecordedTracer()
    served = await serve(tracer=tracer)
    parent = ("traceparent", SAMPLED["traceparent"])
    secret = ("tracestate", "password=hunter2, =")
    for headers in ([("traceparent", "hunter2")], [parent, parent], [parent, secret]):
        await served.http.post("/tokenize", json={"prompt": "x"}, headers=headers)
    malformed, twice, kept = tracer.records
    assert TRACE not in (malformed.trace_id, twice.trace_id)
    assert (kept.trace_id, kept.state) == (TRACE, "")
    assert "hunter2" not in caplog.text


async def test_a_request_that_is_not_sampled_has_no_span_and_passes_its_headers_on(serve_texts: TextServing) -> None:
    tracer = RecordedTracer()
    before = await serve_texts(Behaviour(), tracer=tracer)
    await before.served.http.post(CHAT, json=before.body(), headers=NOT_SAMPLED)
    assert tracer.records == []
    (request,) = before.peers[0].requests
    assert request.headers["traceparent"] == NOT_SAMPLED["traceparent"]
    assert "tracestate" not in request.headers


async def test_without_traces_the_headers_of_a_client_are_passed_on(serve_texts: TextServing) -> None:
    before = await serve_texts(Behaviour())
    await before.served.http.post(CHAT, json=before.body(), headers=SAMPLED)
    (request,) = before.peers[0].requests
    assert {name: request.headers[name] for name in SAMPLED} == SAMPLED


async def test_a_text_upstream_is_called_inside_the_span_of_the_group(serve_texts: TextServing) -> None:
    tracer = RecordedTracer()
    before = await serve_texts(Behaviour(), tracer=tracer)
    await before.served.http.post(CHAT, json=before.body(n=2), headers=SAMPLED)
    group = tracer.one("chat texts")
    for request in before.peers[0].requests:
        assert request.headers["traceparent"] == f"00-{TRACE}-{group.span_id}-01"
        assert request.headers["tracestate"] == "a=1"
    assert group.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert tracer.children(group) == ["choice", "choice"]


async def test_more_choices_of_a_group_are_in_the_trace_of_their_own_request(serve: Serving) -> None:
    tracer = RecordedTracer()
    served = await serve(tracer=tracer)
    answer = (await served.http.post(CHAT, json=body(keep_s=60))).json()
    await served.http.post(f"/v1/groups/{answer['id']}/more", json={"n": 2}, headers=SAMPLED)
    first, more = tracer.named("chat tiny")
    assert first.trace_id != more.trace_id == TRACE
    assert tracer.one("POST /v1/groups/{id}/more").span_id == more.parent_id
    assert first.end_ns <= more.start_ns
    assert [one.start_ns for one in more.children] == [more.start_ns] * 2


async def test_the_span_of_a_choice_that_a_policy_starts_later_starts_then(serve: Serving) -> None:
    tracer = RecordedTracer()
    served = await serve(tracer=tracer)
    await served.http.post(CHAT, json=body(n=3, group={"start": 1}))
    await_each_other(tracer.one("chat tiny"))


async def test_so_does_that_of_a_choice_on_a_text_upstream(serve_texts: TextServing) -> None:
    tracer = RecordedTracer()
    before = await serve_texts(Behaviour(), tracer=tracer)
    await before.served.http.post(CHAT, json=before.body(n=3, group={"start": 1}))
    await_each_other(tracer.one("chat texts"))


def await_each_other(group: SpanRecord) -> None:
    first, second, third = group.children
    assert group.start_ns == first.start_ns
    assert first.end_ns <= second.start_ns < second.end_ns <= third.start_ns < third.end_ns


async def test_requests_for_the_state_of_the_server_have_no_span(serve: Serving) -> None:
    tracer = RecordedTracer()
    served = await serve(tracer=tracer)
    for path in ("/health", "/metrics", "/status", "/v1/models", "/nothing"):
        await served.http.get(path, headers=SAMPLED)
    assert tracer.records == []
    assert json.loads((await served.http.post("/tokenize", json={"prompt": "x"})).text)["count"] == 1
    assert [one.name for one in tracer.records] == ["POST /tokenize"]
