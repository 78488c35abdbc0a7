"""docs/dialects.md lists the fields that `/v1/messages` reads, ignores and refuses, and each error names its field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from motet.api.anthropic.message_output import SIGNATURE, STOP_REASONS
from motet.api.anthropic.messages_schema import (
    BLOCKS,
    MessagePrompt,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
    ThinkingField,
    ToolResultBlock,
    ToolUseBlock,
)
from motet.api.generation.request_fields import OTHER_SERVERS_NEUTRAL
from motet.api.http.schema import Schema
from motet.errors import RequestError
from tests.api.messaging import checked_error, post
from tests.api.one_answer import assert_no_words_of_chats
from tests.api.serving import Served, Serving, WatchedEngine
from tests.error_response import assert_error

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("api.md", "dialects.md"))
SECTION = PAGE.partition("\n## Messages\n")[2].partition("\n## ")[0]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "1", "name": "a", "input": {}}
A = {"name": "a", "input_schema": {"type": "object"}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
NO_FORM = {"type": "json_schema", "schema": {"type": "nothing"}}
B = {"name": "b", "input_schema": {"type": "array"}}

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "schema",
    [MessagesRequest, MessageTool, MessageToolChoice, ThinkingField, OutputConfig, ToolUseBlock, ToolResultBlock],
)
def test_every_field_that_is_read_is_described(schema: type[Schema]) -> None:
    fields = schema.model_fields
    assert [name for name in fields if f"`{name}" not in PAGE and f".{name}" not in PAGE and name != "type"] == []


@pytest.mark.parametrize("name", [*BLOCKS, *STOP_REASONS.values(), "stop_sequence", SIGNATURE])
def test_every_block_and_every_end_is_described(name: str) -> None:
    assert f"`{name}`" in SECTION


def test_every_field_without_an_effect_and_every_refused_one_is_listed() -> None:
    neutral = MessagePrompt.neutral.keys() - OTHER_SERVERS_NEUTRAL.keys()
    names = [*MessagePrompt.ignored, *MessagePrompt.refused, *neutral, *MessageTool.refused]
    assert [name for name in [*names, *MessageTool.neutral] if f"`{name}" not in SECTION] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [USE]}, {"role": "assistant", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"n": 2}, "n"),
        ({"group": {"start": 1}}, "group"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"stop": ["x"]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [A, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tools": [A, B]}, "tools[1].input_schema"),
        ({"tools": [A, A]}, "tools[1].name"),
        ({"tools": [A], "tool_choice": {"type": "tool", "name": "c"}}, "tool_choice.name"),
        ({"tools": [A], "tool_choice": {"type": "auto", "name": "a"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "enormous"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": NO_FORM}}, "output_config.format"),
        ({"output_config": {"format": NO_FORM}, "tools": [A]}, "output_config.format"),
        ({"output_config": {"format": FORM}, "structured_outputs": {"choice": ["x"]}}, "structured_outputs"),
        ({"output_config": {"format": FORM}, "structured_outputs": {"choice": ["x"]}}, "output_config.format"),
        ({"tools": [A], "structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"system": "\ud800"}, "system"),
        ({"max_tokens": 50, "min_tokens": 60}, "min_tokens"),
        ({"tools": [{**A, "name": "response_format"}] * 2}, "tools[1].name"),
        ({"tools": [{**A, "name": "f" * 129}]}, "tools[0].name"),
        ({"messages": [{"role": "assistant", "content": [USE | {"id": ""}]}]}, "messages[0].content[0].id"),
        ({"messages": [{"role": "assistant", "content": [USE | {"name": ""}]}]}, "messages[0].content[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": ""}]}]},
            "messages[0].content[0].tool_use_id",
        ),
    ],
)
async def test_a_wrong_field_is_named(refusing: Served, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50} | fields
    refused = checked_error(await refusing.http.post("/v1/messages", content=json.dumps(body)))
    assert_error(refused, status=400, type="invalid_request_error")
    message = refused.json()["error"]["message"]
    assert re.search(rf"(^|'|schema for ){re.escape(param)}", message), message
    assert_no_words_of_chats(message, fields)


async def test_errors_of_every_layer_are_in_anthropics_shape(serve: Serving) -> None:
    served = await serve(api_keys=("right",), max_body_bytes=1000)
    key, body = {"x-api-key": "right"}, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    post = served.http.post
    no_key = await post("/v1/messages", json=body)
    assert_error(checked_error(no_key), status=401, type="authentication_error")
    wrong_key = await post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
    assert_error(checked_error(wrong_key), status=401, type="authentication_error")
    no_model = await post("/v1/messages", json=body | {"model": "claude"}, headers=key)
    assert_error(checked_error(no_model), status=404, type="not_found_error")
    no_route = await post("/v1/messages/batches", json=body, headers=key)
    assert_error(checked_error(no_route), status=404, type="not_found_error")
    no_method = await served.http.get("/v1/messages", headers=key)
    assert_error(checked_error(no_method), status=405, type="invalid_request_error")
    too_large = await post("/v1/messages", json=body | {"system": "x" * 2000}, headers=key)
    assert_error(checked_error(too_large), status=413, type="request_too_large")
    no_json = await post("/v1/messages/count_tokens", content=b"{", headers=key)
    assert_error(checked_error(no_json), status=400, type="invalid_request_error")
    served.service.start_drain()
    draining = await post("/v1/messages", json=body, headers=key)
    assert_error(checked_error(draining), status=503, type="overloaded_error")


@pytest.mark.parametrize(
    ("prompt", "most", "words"),
    [
        ("hi", 4090, "input length and `max_tokens` exceed context limit: 19 + 4090 > 4096, decrease input length or "),
        ("hi" * 2100, 9, "prompt is too long: 4217 tokens > 4095 maximum"),
        ("hi" * 90_000, 9, "prompt is too long: "),
    ],
)
async def test_the_error_for_too_many_tokens_has_the_numbers_that_clients_parse(
    refusing: Served, prompt: str, most: int, words: str
) -> None:
    refused = checked_error(await post(refusing, prompt, max_tokens=most))
    assert_error(refused, status=400, type="invalid_request_error")
    assert refused.json()["error"]["message"].startswith(words)


@pytest.mark.parametrize("param", ["prompt", "n"])
async def test_an_error_of_the_engine_names_a_field_of_the_request(serve: Serving, param: str) -> None:
    served = await serve(engine=WatchedEngine(fail_after={0: RequestError("it is too much", param=param)}))
    assert_error(checked_error(await post(served)), status=400, message="messages: it is too much")
    assert_error(await served.http.post("/v1/responses", json={"input": "hi"}), status=400, param="input")


async def test_a_bug_is_reported_in_anthropics_shape_too(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={0: ValueError("secret")}))  # type: ignore[dict-item]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    refused = checked_error(await served.http.post("/v1/messages", json=body))
    assert_error(refused, status=500, type="api_error")
    assert "secret" not in refused.json()["error"]["message"]
