"""docs/dialects.md lists the fields that `/v1/responses` reads, ignores and refuses, and each error names its field."""

import json
from pathlib import Path

import pytest

from motet.api.generation.request_fields import OTHER_SERVERS_NEUTRAL
from motet.api.http.schema import Schema
from motet.api.openai.responses import STORED_RESPONSES
from motet.api.openai.responses_schema import (
    FunctionTool,
    MessageInput,
    ReasoningField,
    ResponsesRequest,
    TextField,
    TextFormat,
)
from tests.api.one_answer import assert_no_words_of_chats
from tests.api.serving import Served

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("api.md", "dialects.md"))
A, B = ({"type": "function", "name": name} for name in "ab")
GROUP, CUSTOM = {"type": "namespace", "name": "g"}, {"type": "custom", "name": "c"}
FORM = {"type": "json_schema", "name": "x", "schema": {}}
SECTION = PAGE.partition("\n## Responses\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("schema", [ResponsesRequest, FunctionTool, TextField, ReasoningField, MessageInput])
def test_every_field_that_is_read_is_described(schema: type[Schema]) -> None:
    fields = schema.model_fields
    assert [name for name in fields if f"`{name}" not in PAGE and f".{name}" not in PAGE and name != "type"] == []


def test_every_field_of_a_format_is_described() -> None:
    names = [field.alias or name for name, field in TextFormat.model_fields.items()]
    assert [name for name in names if f"`{name}`" not in SECTION and name != "type"] == []


def test_every_ignored_field_is_listed() -> None:
    assert [name for name in ResponsesRequest.ignored if f"`{name}`" not in SECTION] == []


@pytest.mark.parametrize("schema", [ResponsesRequest, FunctionTool])
def test_every_value_without_effect_is_listed(schema: type[Schema]) -> None:
    own = {name for name, passing in schema.neutral.items() if passing} - OTHER_SERVERS_NEUTRAL.keys()
    assert [name for name in own if f"`{name}" not in SECTION] == []


def test_every_field_that_is_refused_is_listed() -> None:
    assert [name for name in ResponsesRequest.advice if f"`{name}" not in SECTION] == []


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "path"), STORED_RESPONSES)
async def test_no_response_is_stored(served: Served, method: str, path: str) -> None:
    response = await served.http.request(method, path.replace("{response_id}", "resp_1"))
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("not_found", "response_id")
    assert "stores no responses" in error["message"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"include": ["nonsense"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "no good"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type"),
        ({"tools": [{**GROUP, "tools": [A, {"type": "mcp"}]}], "tool_choice": "required"}, "tools[0].tools[1].type"),
        ({"tools": [CUSTOM, CUSTOM]}, "tools[1].name"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "custom", "name": "no good"}]}, "tools[0].name"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "c", "input": {}}]}, "input[0].input"),
        ({"tools": [CUSTOM, {**GROUP, "tools": [A, {"type": "function"}]}]}, "tools[1].tools[1].name"),
        ({"tools": [CUSTOM, {**GROUP, "tools": [A, {**A, "name": "no good"}]}]}, "tools[1].tools[1].name"),
        ({"tools": [{"type": "unheard_of"}]}, "tools[0].type"),
        ({"tool_choice": {"name": "a"}}, "tool_choice.type"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": [A], "tool_choice": {"type": "auto", "name": "a"}}, "tool_choice.name"),
        ({"tools": [A], "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice.name"),
        ({"tools": [A], "tool_choice": {"type": "function", "name": "a", "mode": "auto"}}, "tool_choice.mode"),
        ({"tools": [A], "tool_choice": {"type": "allowed_tools", "tools": [A]}}, "tool_choice.mode"),
        (
            {"tools": [A], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["a"]}},
            "tool_choice.tools[0]",
        ),
        ({"tools": [A], "tool_choice": B}, "tool_choice.name"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "3"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
            "input[0].output[0]",
        ),
        ({"input": "\ud800"}, "input"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a"),
        ({"text": {"format": {**FORM, "description": "\ud800"}}}, "text"),
        ({"text": {"format": {**FORM, "schema": {"type": "nothing"}}}}, "text.format"),
        ({"text": {"format": FORM}, "structured_outputs": {"choice": ["x"]}}, "structured_outputs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"instructions": "\ud800"}, "instructions"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": "["}]}, "input"),
    ],
)
async def test_a_wrong_field_is_named(refusing: Served, fields: dict[str, object], param: str) -> None:
    response = await refusing.http.post("/v1/responses", content=json.dumps({"input": "hi"} | fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert_no_words_of_chats(error["message"], fields)
    assert "messages" not in error["message"] or "messages" in fields
