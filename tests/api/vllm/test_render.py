"""A rendered request is a body for `/inference/v1/generate`, which then sends the engine the same request."""

from typing import Any

import msgspec
import pytest

from motet.types import GenerateRequest
from tests.api.serving import PROMPT, SEED, Served, Serving, saying
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
EVERYTHING: dict[str, Any] = {
    "n": 3,
    "seed": -5,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 1.5},
    "allowed_token_ids": [7, 8, 9],
    "stop": ["END", "x"],
    "stop_token_ids": [9],
    "min_tokens": 2,
    "max_tokens": 11,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "cache_salt": "salt",
    "keep_s": 0.5,
    "priority": 3,
}


def comparable(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, request_id="", trace="", session_id="")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, CHAT_BODY),
        (CHAT, CHAT_BODY | EVERYTHING),
        (CHAT, CHAT_BODY | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "seed": 3}),
        (CHAT, CHAT_BODY | {"logprobs": True, "logprob_token_ids": [5, 6]}),
        (
            CHAT,
            CHAT_BODY | {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}},
        ),
        (CHAT, CHAT_BODY | {"structured_outputs": {"choice": ["a", "b"]}, "chat_template_kwargs": {"x": 1}}),
        (CHAT, CHAT_BODY | {"stream": True, "stream_options": {"include_usage": True}}),
        (COMPLETIONS, {"prompt": PROMPT}),
        (COMPLETIONS, {"prompt": "hello there", **EVERYTHING}),
        (COMPLETIONS, {"prompt": ["x", "yy"], "logprobs": True, "structured_outputs": {"regex": "[0-9]+"}}),
    ],
)
async def test_generate_accepts_a_rendered_request_and_sends_the_engine_the_same(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    answer = await served.http.post(f"{path}/render", json=fields)
    assert answer.status_code == 200, answer.text
    assert served.engine.requests == []  # nothing is generated
    rendered = answer.json() if path == COMPLETIONS else [answer.json()]
    assert (await served.http.post(path, json=fields)).status_code == 200
    expected, served.engine.requests = served.engine.requests, []
    for body in rendered:
        assert (await served.http.post("/inference/v1/generate", json=body)).status_code == 200
    assert [*map(comparable, served.engine.requests)] == [*map(comparable, expected)]
    assert {body["stream"] for body in rendered} == {fields.get("stream", False)}


async def test_a_plain_chat_is_rendered_in_vllm_s_shape(served: Served) -> None:
    body = (await served.http.post(f"{CHAT}/render", json=CHAT_BODY | {"max_tokens": 5})).json()
    tokens = (await served.http.post("/tokenize", json=CHAT_BODY)).json()["tokens"]
    request_id = body.pop("request_id")
    assert request_id.startswith("chatcmpl-")
    context = {"tools": None, "tool_choice": "none", "parallel_tool_calls": True, "include_reasoning": True}
    assert body == {
        "model": "tiny",
        "token_ids": tokens,
        "parse_context": context,
        "sampling_params": {"max_tokens": 5},
        "stream": False,
    }


@pytest.mark.parametrize(
    "cut", [{}, {"truncate_prompt_tokens": 3}, {"truncate_prompt_tokens": 3, "truncation_side": "right"}]
)
async def test_the_offsets_of_tokens_are_those_of_the_text(served: Served, cut: dict[str, Any]) -> None:
    """Shortened prompts keep the offsets of the entire text."""
    texts = ["Two boats, 日本 😀", "there"]
    fields = {"prompt": texts, "return_token_offsets": True, **cut}
    rendered = (await served.http.post(f"{COMPLETIONS}/render", json=fields)).json()
    chat = CHAT_BODY | {"return_token_offsets": True, **cut}
    rendered.append((await served.http.post(f"{CHAT}/render", json=chat)).json())
    await served.chat()
    for text, body in zip([*texts, served.prompt], rendered, strict=True):
        assert len(body["token_offsets"]) == len(body["token_ids"])
        for token, (start, end) in zip(body["token_ids"], body["token_offsets"], strict=True):
            shown = served.tokenizer.token_text(token)
            assert start == end == 0 or text[start:end] == shown or "\ufffd" in shown
        assert (await served.http.post("/inference/v1/generate", json=body)).status_code == 200


async def test_without_a_text_of_these_tokens_there_are_no_offsets(served: Served) -> None:
    forged = CHAT_BODY | {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    for path, fields in ((CHAT, CHAT_BODY | {"prompt_token_ids": PROMPT}), (CHAT, forged)):
        body = (await served.http.post(f"{path}/render", json=fields | {"return_token_offsets": True})).json()
        assert body["token_offsets"] is None
        assert "token_offsets" not in (await served.http.post(f"{path}/render", json=fields)).json()
    (ids,) = (
        await served.http.post(f"{COMPLETIONS}/render", json={"prompt": PROMPT, "return_token_offsets": True})
    ).json()
    assert ids["token_offsets"] is None
    assert_error(await served.chat(return_token_offsets=True), status=400, param="return_token_offsets")


async def test_a_message_is_rendered_as_its_chat(served: Served) -> None:
    body = CHAT_BODY | {"system": "be short", "max_tokens": 5, "stop_sequences": ["x"], "cache_salt": "s"}
    rendered = (await served.http.post("/v1/messages/render", json=body)).json()
    assert (await served.http.post("/v1/messages", json=body)).status_code == 200
    expected = served.engine.requests.pop()
    assert (await served.http.post("/inference/v1/generate", json=rendered)).status_code == 200
    got = served.engine.requests.pop()
    assert comparable(msgspec.structs.replace(got, choices=())) == comparable(
        msgspec.structs.replace(expected, choices=())
    )
    wrong = await served.http.post("/v1/messages/render", json=body | {"temperature": 9})
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")


async def test_a_response_is_rendered_as_its_chat(served: Served) -> None:
    body = {"instructions": "be short", "input": "hi", "max_output_tokens": 5, "temperature": 0}
    rendered = (await served.http.post("/v1/responses/render", json=body)).json()
    assert rendered["request_id"].startswith("resp_")
    assert (await served.http.post("/v1/responses", json=body)).status_code == 200
    expected = served.engine.requests.pop()
    assert (await served.http.post("/inference/v1/generate", json=rendered)).status_code == 200
    got = served.engine.requests.pop()
    assert comparable(msgspec.structs.replace(got, choices=())) == comparable(
        msgspec.structs.replace(expected, choices=())
    )
    wrong = await served.http.post("/v1/responses/render", json=body | {"previous_response_id": "resp_1"})
    assert_error(wrong, status=400, param="previous_response_id")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "kv_transfer_params": {}}, "kv_transfer_params"),
        (COMPLETIONS, {"prompt": ["x", ""]}, "prompt[1]"),
        (CHAT, CHAT_BODY | {"kv_transfer_params": {}}, "kv_transfer_params"),
        (CHAT, CHAT_BODY | {"temperature": 9}, "temperature"),
        (CHAT, CHAT_BODY | {"model": "other"}, "model"),
    ],
)
async def test_a_field_that_cannot_be_rendered_is_named(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await served.http.post(f"{path}/render", json=fields)
    assert_error(response, status=404 if param == "model" else 400, param=param)


async def test_the_stop_strings_of_a_rendered_request_end_its_choices(serve: Serving) -> None:
    served = await serve(saying("one END two"))
    body = (await served.http.post(f"{CHAT}/render", json=CHAT_BODY | {"stop": "END"})).json()
    (choice,) = (await served.http.post("/inference/v1/generate", json=body)).json()["choices"]
    assert choice["token_ids"] == fake_answer("one END", eos=False)
    assert served.engine.requests[0].choices[0].seed == SEED
