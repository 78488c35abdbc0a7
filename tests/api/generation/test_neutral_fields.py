"""Fields of other servers with values that change nothing, and values that clients write in another form."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.api.anthropic.messages_schema import MessagesRequest
from motet.api.generation.request_fields import OTHER_SERVERS_NEUTRAL, SAMPLING_NAMES
from motet.api.http.schema import Schema
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.completions import CompletionRequest
from motet.api.openai.responses_schema import ResponsesRequest
from motet.api.sglang.sglang_schema import SglangRequest, SglangSampling
from motet.api.vllm.generate import GenerateSampling
from motet.types import GenerateRequest
from tests.api.serving import PROMPT, Served
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

PAGE = (Path(__file__).parents[3] / "docs/dialects.md").read_text()
SECTION = PAGE.partition("\n## Fields of other servers\n")[2].partition("\n## ")[0]
TURN = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [TURN], "max_tokens": 9},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {}},
    "/generate": {"input_ids": PROMPT, "sampling_params": {}},
}
SCHEMAS: dict[str, type[Schema]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/generate": SglangRequest,
}
NESTED: dict[str, type[Schema]] = {"/inference/v1/generate": GenerateSampling, "/generate": SglangSampling}


def sampled(request: GenerateRequest) -> tuple[Any, ...]:
    return request.prompt, request.sampling, [choice.seed for choice in request.choices]


def neutral(schema: type[Schema]) -> list[tuple[str, Any]]:
    """Returns every value without effect."""
    return [(name, value) for name, values in schema.neutral.items() for value in values]


async def post_json(served: Served, path: str, text: str) -> httpx.Response:
    return await served.http.post(path, content=text, headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", list(SCHEMAS))
async def test_neutral_values_change_nothing(served: Served, path: str) -> None:
    fields = dict(neutral(SCHEMAS[path]))
    extra: dict[str, Any] = {"structured_outputs": {}} if "structured_outputs" in SCHEMAS[path].model_fields else {}
    seed = {} if path == "/generate" else {"seed": 5}
    inner = {"sampling_params": {"sampling_seed": 5}} if path == "/generate" else {}
    for body in ({}, fields, extra):
        answer = await served.http.post(path, json=BODIES[path] | seed | inner | body)
        assert answer.status_code == 200, answer.text
    plain, *others = map(sampled, served.engine.requests)
    assert others == [plain, plain]


@pytest.mark.parametrize("path", list(SCHEMAS))
async def test_each_neutral_value_is_accepted_alone(served: Served, path: str) -> None:
    for name, value in neutral(SCHEMAS[path]):
        answer = await served.http.post(path, json=BODIES[path] | {name: value})
        assert answer.status_code == 200, (name, answer.text)


@pytest.mark.parametrize("path", list(NESTED))
async def test_neutral_values_in_sampling_params_are_accepted(served: Served, path: str) -> None:
    each: list[dict[str, Any]] = [dict(neutral(NESTED[path])), {"stop_token_ids": [], "logit_bias": {}}]
    for fields in each:
        answer = await served.http.post(path, json=BODIES[path] | {"sampling_params": fields})
        assert answer.status_code == 200, answer.text


async def test_another_value_of_such_a_field_is_refused_by_name(refusing: Served) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        for name, value in (("length_penalty", 0.5), ("use_beam_search", True), ("thinking_token_budget", 5)):
            refused = await refusing.http.post(path, json=BODIES[path] | {name: value})
            assert_error(refused, status=400, param=name, code="unsupported_parameter")


def test_every_field_of_another_server_is_listed() -> None:
    assert [name for name in (*OTHER_SERVERS_NEUTRAL, *SAMPLING_NAMES) if f"`{name}" not in SECTION] == []


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "max_tokens", "2.0"),
        ("/v1/completions", "max_tokens", "2e0"),
        ("/v1/completions", "n", "2.0"),
        ("/v1/completions", "seed", "-1.0"),
        ("/v1/completions", "seed", "9e18"),
        ("/v1/completions", "top_k", "5.0"),
        ("/v1/completions", "logprobs", "1.0"),
        ("/v1/completions", "priority", "0.0"),
        ("/v1/completions", "session_id", "7.0"),
        ("/v1/completions", "stop_token_ids", "[5.0, 6]"),
        ("/v1/completions", "prompt", "[5.0, 6]"),
        ("/v1/completions", "prompt", "[[5.0, 6], [7]]"),
        ("/v1/completions", "group", '{"stop_when": {"finished": 1.0}}'),
        ("/v1/chat/completions", "max_completion_tokens", "3.0"),
        ("/v1/chat/completions", "allowed_token_ids", "[5.0]"),
        ("/v1/chat/completions", "reasoning_effort", "null"),
        ("/v1/responses", "max_output_tokens", "3.0"),
        ("/v1/messages", "max_tokens", "3.0"),
        ("/inference/v1/generate", "token_ids", "[5.0, 6]"),
        ("/inference/v1/generate", "sampling_params", '{"max_tokens": 3.0}'),
        ("/inference/v1/generate", "choices", '[{"index": 0.0, "token_ids": [9.0]}]'),
        ("/generate", "input_ids", "[5.0]"),
        ("/generate", "sampling_params", '{"max_new_tokens": 3.0}'),
    ],
)
async def test_a_whole_decimal_is_an_integer(served: Served, path: str, field: str, value: str) -> None:
    def body(text: str) -> str:
        return json.dumps(BODIES[path] | {field: None})[:-1] + f', "{field}": {text}}}'

    answers = [
        await post_json(served, path, body(text)) for text in (value, value.replace(".0", "").replace("2e0", "2"))
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    with_decimal, without = served.engine.requests[:: len(served.engine.requests) // 2]
    assert with_decimal.prompt == without.prompt
    assert with_decimal.sampling == without.sampling


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", '"max_tokens": 2.5', "max_tokens"),
        ("/v1/completions", '"n": 1e400', "n"),
        ("/v1/completions", '"seed": 1e20', "seed"),
        ("/v1/completions", '"prompt": [5.5]', "prompt"),
        ("/v1/completions", '"prompt": ["x", [5.5]]', "prompt[1]"),
        ("/v1/completions", '"prompt": [true]', "prompt"),
        ("/v1/completions", '"stop_token_ids": [5, 6.5]', "stop_token_ids[1]"),
        ("/inference/v1/generate", '"token_ids": [5.0, 6.5]', "token_ids[1]"),
        ("/inference/v1/generate", '"token_ids": [5.0, -6.0]', "token_ids[1]"),
    ],
)
async def test_another_decimal_is_refused(refusing: Served, path: str, fields: str, param: str) -> None:
    refused = await post_json(refusing, path, json.dumps(BODIES[path])[:-1] + f", {fields}}}")
    assert_error(refused, status=400, param=param)


async def test_content_without_parts_is_empty_content(served: Served) -> None:
    contents: list[Any] = [[], ""]
    for content in contents:
        turns = [{"role": "user", "content": content}, {"role": "tool", "tool_call_id": "c", "content": content}]
        answer = await served.http.post("/v1/chat/completions", json={"messages": [TURN, *turns]})
        assert answer.status_code == 200, answer.text
        given = [{"role": "user", "content": content}, {"type": "message", "role": "user", "content": "hi"}]
        assert (await served.http.post("/v1/responses", json={"input": given})).status_code == 200
    of_parts, response_of_parts, of_text, response_of_text = (request.prompt for request in served.engine.requests)
    assert (of_parts, response_of_parts) == (of_text, response_of_text)
    for turn in ({"role": "user"}, {"role": "user", "content": None}):
        refused = await served.http.post("/v1/chat/completions", json={"messages": [turn]})
        assert_error(refused, status=400, param="messages[0].content", code="missing_required_parameter")


async def test_a_list_of_prompts_can_have_texts_and_token_ids(served: Served) -> None:
    answer = await served.complete(["hi", PROMPT, "there"], n=2, seed=1)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(6))
    for prompt in ("hi", PROMPT, "there"):
        await served.complete(prompt, n=2, seed=1)
    together, alone = served.engine.requests[:3], served.engine.requests[3:]
    assert [*map(sampled, together)] == [*map(sampled, alone)]


@pytest.mark.parametrize("prompt", [["hi", 5], [[5], 6], [5, "hi"], ["hi", None], ["hi", {}]])
async def test_a_prompt_of_another_kind_is_refused(refusing: Served, prompt: object) -> None:
    assert_error(await refusing.complete(prompt), status=400, param="prompt", code="invalid_type")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_the_seed_has_the_names_of_other_servers(served: Served, path: str) -> None:
    for name in ("seed", "random_seed", "sampling_seed"):
        assert (await served.http.post(path, json=BODIES[path] | {name: 7})).status_code == 200
    assert [request.choices[0].seed for request in served.engine.requests] == [7, 7, 7]
    assert (await served.http.post(path, json=BODIES[path] | {"seed": 7, "random_seed": 7})).status_code == 200
    refused = await served.http.post(path, json=BODIES[path] | {"seed": 7, "random_seed": 8})
    assert refused.status_code == 400
    assert "'random_seed': it is another name of 'seed'" in refused.json()["error"]["message"]


async def test_the_length_error_of_a_scored_prompt_requests_no_tokens(served: Served) -> None:
    longest = served.engine.info.max_model_len
    refused = await served.complete([5] * longest, echo=True, logprobs=0, max_tokens=0)
    assert_error(refused, status=400, code="context_length_exceeded")
    assert f"resulted in {longest} tokens" in (message := refused.json()["error"]["message"])
    assert f"an answer of 0 tokens can have {longest - 1}" in message
    body = {"input_ids": [5] * longest, "sampling_params": {"max_new_tokens": 0}}
    assert f"can have {longest - 1}" in (await served.http.post("/generate", json=body)).json()["error"]["message"]
    assert (await served.complete([5] * (longest - 1), echo=True, logprobs=0, max_tokens=0)).status_code == 200
