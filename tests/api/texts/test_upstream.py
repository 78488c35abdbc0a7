"""Text models through the real app: answers come from the other server, under the rules of Motet models."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from motet.api.http.failure import WORKER_HEADER
from motet.engines.upstream.upstream_server import UpstreamOptions
from motet.settings.server_config import ServerConfig
from tests.api.serving import MODEL, chunks, events, group_lines, streamed_or_not
from tests.api.text_models import TEXTS, TextServing, joined, texts_of
from tests.error_response import assert_error
from tests.peers.openai_script import CHAT, Behaviour, Break, FixedAnswer, UsagePlace

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("ignores_n", [False, True], ids=["n honoured", "n ignored"])
@streamed_or_not
async def test_n_choices_come_with_one_head_and_one_usage(
    serve_texts: TextServing, ignores_n: bool, stream: bool
) -> None:
    gateway = await serve_texts(Behaviour(ignores_n=ignores_n))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await gateway.chat(n=3, seed=4, stream=stream, **options)
    assert response.status_code == 200
    assert response.headers[WORKER_HEADER] == "texts-0"
    answer = joined(chunks(response)) if stream else response.json()
    assert texts_of(answer) == ["hi 4", "hi 5 w0", "hi 6 w0 w1"]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 9,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == TEXTS
    if stream:
        heads = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks(response)}
        assert heads == {(answer["id"], answer["created"], TEXTS, "chat.completion.chunk")}
        ends = [c["finish_reason"] for chunk in chunks(response) for c in chunk["choices"]]
        assert ends.count("stop") == 3
        assert all(chunk["usage"] is None for chunk in chunks(response)[:-1])
    else:
        assert answer["system_fingerprint"] == "fp"


@streamed_or_not
async def test_prompts_are_numbered_as_for_motets_own_models(serve_texts: TextServing, stream: bool) -> None:
    gateway = await serve_texts(Behaviour(ignores_n=True))
    response = await gateway.complete(prompt=["a", "b"], n=2, seed=4, stream=stream)
    answer = joined(chunks(response)) if stream else response.json()
    assert texts_of(answer) == ["a 4", "a 5 w0", "b 4", "b 5 w0"]
    assert answer["object"] == "text_completion"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("stop", "stop"),
        ("content_filter", "content_filter"),
        ("eos_token", "stop"),
        ("sensitive", "content_filter"),
        ("MAX_TOKENS", "length"),
        ("tool_use", "tool_calls"),
        ("tired", "stop"),
    ],
)
@streamed_or_not
async def test_a_foreign_finish_reason_becomes_openai_s_and_is_kept_as_stop_reason(
    serve_texts: TextServing, stream: bool, sent: str, shown: str
) -> None:
    gateway = await serve_texts(Behaviour(ends_with=sent))
    response = await gateway.chat(n=2, stream=stream)
    choices = (
        [choice for chunk in chunks(response) for choice in chunk["choices"]] if stream else response.json()["choices"]
    )
    ended = [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]]
    assert ended == 2 * [(shown, None if sent == shown else sent)]
    metrics = await gateway.served.metrics()
    assert f'motet:request_success_total{{finished_reason="{shown}",model_name="{TEXTS}"}} 2.0' in metrics


async def test_the_official_client_reads_choices_as_they_arrive(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(ignores_n=True, finishes_at_end=True, role_everywhere=True))
    texts = ["", "", ""]
    ends: list[int] = []
    stream = await gateway.served.openai.chat.completions.create(
        model=TEXTS, messages=[{"role": "user", "content": "hi"}], n=3, seed=4, stream=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == ["hi 4", "hi 5 w0", "hi 6 w0 w1"]
    assert sorted(ends) == [0, 1, 2]
    answer = await gateway.served.openai.completions.create(model=TEXTS, prompt=["a", "b"], seed=4)
    assert [choice.text for choice in answer.choices] == ["a 4", "b 4"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2


async def test_motets_own_models_next_to_a_text_model_answer_as_usual(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour())
    assert texts_of((await gateway.served.chat(model=MODEL)).json()) == ["hello 0"]
    assert_error(await gateway.served.chat(model="none"), status=404, code="model_not_found")
    assert (await gateway.served.chat(model=5)).json()["error"]["code"] == "invalid_type"
    assert (await gateway.served.http.post(CHAT, content=b"no json")).status_code == 400
    assert gateway.peers[0].requests == []


async def test_a_body_counts_only_until_its_request_is_read(serve_texts: TextServing) -> None:
    config = ServerConfig(served_model_name="", max_open_body_bytes=100_000)
    gateway = await serve_texts(Behaviour(), config=config)
    gate, peer = gateway.peers[0].close_gate(), gateway.peers[0]
    long = [{"role": "user", "content": "x" * 150_000}]
    gate.release()
    body = gateway.body(messages=long, seed=4, stream=True)
    async with gateway.served.http.stream("POST", CHAT, json=body) as running:
        second = asyncio.create_task(gateway.chat(messages=long, seed=4))
        while len(peer.requests) < 2 and not second.done():  # noqa: ASYNC110  if it is refused, nothing arrives
            await asyncio.sleep(0.01)
        for _ in range(40):
            gate.release()
        await running.aread()
    assert (await second).status_code == 200


async def test_the_only_model_need_not_be_named(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(), with_tokens=False)
    response = await gateway.served.http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "seed": 4})
    assert texts_of(response.json()) == ["hi 4"]
    assert gateway.peers[0].requests[0].body["model"] == TEXTS


BAD_FIELDS: dict[str, tuple[dict[str, object], str, str]] = {
    "n of 0": ({"n": 0}, "n", "integer_below_min_value"),
    "n of a text": ({"n": "2"}, "n", "invalid_type"),
    "n above the most": ({"n": 257}, "n", "integer_above_max_value"),
    "seed of 65 bits": ({"seed": 2**64}, "seed", "integer_above_max_value"),
    "stream of a number": ({"stream": 1}, "stream", "invalid_type"),
    "include_usage of a text": (
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "invalid_type",
    ),
}


@pytest.mark.parametrize("name", list(BAD_FIELDS))
async def test_fields_that_motet_must_understand_are_refused_with_motets_message(
    serve_texts: TextServing, name: str
) -> None:
    fields, param, code = BAD_FIELDS[name]
    gateway = await serve_texts(Behaviour())
    of_texts = (await gateway.chat(**fields)).json()["error"]
    of_tokens = (await gateway.served.http.post(CHAT, json=gateway.body(**fields) | {"model": MODEL})).json()["error"]
    assert (of_texts["param"], of_texts["code"]) == (param, code)
    assert of_texts == of_tokens
    assert gateway.peers[0].requests == []


async def test_too_many_choices_or_prompts_are_refused(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(), config=ServerConfig(served_model_name="", max_choices=4))
    assert (await gateway.complete(prompt=["a", "b", "c"], n=2)).json()["error"]["code"] == "too_many_choices"


@streamed_or_not
async def test_a_refusal_is_passed_on_with_its_status_and_message(serve_texts: TextServing, stream: bool) -> None:
    gateway = await serve_texts(Behaviour(refuses=frozenset({"tools"})))
    response = await gateway.chat(n=2, stream=stream, tools=[{}])
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "no tools here",
        "type": "invalid_request_error",
        "param": "tools",
        "code": "unsupported_value",
    }


async def test_tools_and_forms_reach_the_server_unchanged(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour())
    custom = {"type": "custom", "custom": {"name": "run", "format": {"type": "text"}}}
    fields = {"tools": [custom], "tool_choice": "required", "response_format": {"type": "json_object"}, "top_k": None}
    call = {"id": "1", "type": "custom", "custom": {"name": "run", "input": "ls"}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "and then?"}]
    assert (await gateway.served.http.post(CHAT, json=gateway.body(**fields) | {"messages": turns})).status_code == 200
    sent = gateway.peers[0].requests[0].body
    assert {name: sent[name] for name in fields} | {"messages": sent["messages"]} == fields | {"messages": turns}


async def test_a_rate_limit_of_the_server_is_passed_on_with_its_retry_after(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour())
    gateway.peers[0].behaviour.next_errors = [
        FixedAnswer(429, b'{"error":{"message":"slow"}}', (("retry-after", "9"),))
    ]
    response = await gateway.chat()
    assert (response.status_code, response.headers["retry-after"]) == (429, "9")


@pytest.mark.parametrize("how", list(Break))
async def test_a_stream_that_breaks_ends_with_an_error_event_that_names_the_choice(
    serve_texts: TextServing, how: Break, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="motet.api")
    gateway = await serve_texts(Behaviour(ignores_n=True, breaks={5: how}))
    gate = gateway.peers[0].close_gate()
    gate.release()
    async with gateway.served.http.stream("POST", CHAT, json=gateway.body(n=2, seed=4, stream=True)) as response:
        for _ in range(20):  # after the first token
            gate.release()
        await response.aread()
    *_, error, done = events(response)
    assert done == "[DONE]"
    shown_error = json.loads(error)["error"]
    assert "Choice 1" in shown_error["message"]
    assert "http://" not in shown_error["message"]
    (line,) = group_lines(caplog)
    assert gateway.peers[0].url in line["error"]
    assert shown_error["code"] == ("engine_error" if how is Break.EVENT else "engine_died")


async def test_a_request_goes_to_another_server_if_one_fails_at_once(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(), Behaviour())
    gateway.peers[0].behaviour.next_errors = [FixedAnswer(503)]
    response = await gateway.chat(seed=4)
    assert texts_of(response.json()) == ["hi 4"]
    assert response.headers[WORKER_HEADER] == "texts-1"


@streamed_or_not
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_ends_everything_on_the_server(
    serve_texts: TextServing, n: int, stream: bool
) -> None:
    gateway = await serve_texts(Behaviour(ignores_n=True))
    peer = gateway.peers[0]
    peer.close_gate()
    request = asyncio.create_task(gateway.chat(n=n, stream=stream))
    for _ in range(n):
        await peer.arrived.acquire()
    assert gateway.fleet.members[0].load.open_choices == n
    request.cancel()
    await gateway.served.service.admission.empty()
    await peer.until_idle()
    metrics = await gateway.served.metrics()
    assert f'motet:groups_total{{model_name="{TEXTS}",status="499"}} 1.0' in metrics


async def test_admission_and_key_limits_hold_for_text_models_too(serve_texts: TextServing) -> None:
    config = ServerConfig(served_model_name="", max_waiting_groups=1, key_max_choices=2)
    gateway = await serve_texts(Behaviour(), config=config)
    peer = gateway.peers[0]
    gate = peer.close_gate()
    first = asyncio.create_task(gateway.chat(seed=4))
    await peer.arrived.acquire()
    waiting = await gateway.chat()
    assert_error(waiting, status=503, code="overloaded")
    gate.release()
    assert (await first).status_code == 200
    too_many = await gateway.chat(n=3)
    assert_error(too_many, status=400, code="too_many_choices")


async def test_a_request_is_logged_once_with_its_usage(
    serve_texts: TextServing, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await serve_texts(Behaviour(ignores_n=True))
    with caplog.at_level("INFO", logger="motet.api"):
        headers = {"x-request-id": "mine", "x-session-id": "s"}
        answer = await gateway.served.http.post(CHAT, json=gateway.body(n=2, seed=4), headers=headers)
    (fields,) = group_lines(caplog)
    names = ("request_id", "status", "model", "worker", "n", "finished")
    assert [fields[name] for name in names] == ["mine", 200, TEXTS, "texts-0", 2, 2]
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (2, 5)
    sent = gateway.peers[0].requests[0].headers
    assert (sent["x-request-id"], sent["x-session-id"]) == ("mine", "s")
    assert answer.json()["id"].startswith("chatcmpl-mine-")


async def test_usage_that_the_server_did_not_send_is_null(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(ignores_n=True, usage=UsagePlace.NONE))
    assert (await gateway.chat(n=2)).json()["usage"] is None
    streamed = await gateway.chat(n=2, stream=True, stream_options={"include_usage": True})
    assert chunks(streamed)[-1]["usage"] is None


@pytest.mark.parametrize("gateway_has_keys", [False, True])
async def test_a_key_of_this_server_never_reaches_a_text_server(
    serve_texts: TextServing, gateway_has_keys: bool
) -> None:
    config = ServerConfig(served_model_name="", api_keys=("ours",) if gateway_has_keys else ())
    gateway = await serve_texts(Behaviour(), options=UpstreamOptions(pass_key=True), config=config)
    headers = {"authorization": "Bearer ours"}
    assert (await gateway.served.http.post(CHAT, json=gateway.body(), headers=headers)).status_code == 200
    sent = gateway.peers[0].requests[0].headers.get("authorization")
    assert sent == (None if gateway_has_keys else "Bearer ours")


async def test_a_body_that_breaks_off_reaches_no_server(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour())
    await gateway.served.break_off("/v1/completions")
    assert gateway.peers[0].requests == []


@pytest.mark.slow
async def test_a_body_that_is_too_large_is_refused(serve_texts: TextServing) -> None:
    gateway = await serve_texts(Behaviour(), config=ServerConfig(served_model_name="", max_body_bytes=100))

    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * 101

    response: httpx.Response = await gateway.served.http.post(CHAT, content=parts())
    assert response.status_code == 413
