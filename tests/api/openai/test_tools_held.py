"""Answers that must be tool calls, must have a form, or either of the two."""

import json
from typing import Any

import msgspec
import pytest

from motet.testing.fake_engine import fake_info
from motet.text.formats import FORMATS
from motet.text.tools.tool_format import ToolFormat
from motet.types import Grammar
from tests.api.calling import PARIS, TIME, WEATHER, CallingServing, called
from tests.api.serving import Served, saying
from tests.error_response import assert_error
from tests.grammar.models import follows, grammars_of

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ANSWER = '{"a": 1}'


def with_grammar(served: Served) -> Grammar:
    """Returns the grammar of the last request, without its rule for reasoning."""
    grammar = served.engine.requests[-1].sampling.grammar
    assert grammar is not None
    return msgspec.structs.replace(grammar, thinking=None)


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS.keys())
async def test_with_tools_an_answer_is_in_its_form_or_a_call(
    serve_tools: CallingServing, tool_format: ToolFormat
) -> None:
    served = await serve_tools(saying(ANSWER), tools=tool_format)
    response = await served.chat(tools=[WEATHER, TIME], response_format=AS_SCHEMA)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")
    grammars, grammar = grammars_of(), with_grammar(served)
    assert follows(grammars, grammar, ANSWER)
    assert not follows(grammars, grammar, '{"b": 1}')
    assert not follows(grammars, grammar, "Well.")


@pytest.mark.parametrize("additional_properties", [False, True])
async def test_a_call_has_only_declared_arguments_unless_the_server_allows_others(
    serve_tools: CallingServing, additional_properties: bool
) -> None:
    served = await serve_tools(saying(PARIS), additional_properties=additional_properties)
    for fields in ({"tool_choice": "required"}, {"response_format": AS_SCHEMA}):
        assert (await served.chat(tools=[WEATHER], **fields)).status_code == 200
        grammars, grammar = grammars_of(), with_grammar(served)
        assert follows(grammars, grammar, PARIS)
        more = called("get_weather", '{"city": "Paris", "mood": "grey"}')
        assert follows(grammars, grammar, more) == additional_properties
    assert '"additionalProperties"' not in served.prompt  # the prompt has the tools unchanged


LLAMA_PARIS = '{"name": "get_weather", "parameters": {"city": "Paris"}}'


@pytest.mark.parametrize(
    ("name", "schema", "answer", "call"),
    [
        ("llama3_json", {"type": "object"}, '{"name": "get_weather", "age": 1}', LLAMA_PARIS),
        ("llama3_json", NAME, '{"name": "get_weather"}', LLAMA_PARIS),
        ("pythonic", {"type": "array", "items": {"type": "string"}}, '["get_weather"]', '[get_weather(city="Paris")]'),
    ],
)
async def test_a_form_that_starts_like_a_call_is_not_taken_for_one(
    serve_tools: CallingServing, name: str, schema: object, answer: str, call: str
) -> None:
    served = await serve_tools(saying(answer, call), tools=FORMATS[name])
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    first, second = (await served.chat(tools=[WEATHER], response_format=form, n=2)).json()["choices"]
    assert (first["message"]["content"], first["finish_reason"]) == (answer, "stop")
    assert (second["message"]["content"], second["finish_reason"]) == (None, "tool_calls")
    assert follows(grammars_of(), with_grammar(served), answer)
    assert follows(grammars_of(), with_grammar(served), call)


@pytest.mark.parametrize("fields", [{}, {"response_format": AS_SCHEMA}])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_a_tool_choice_allows_only_its_calls(
    serve_tools: CallingServing, choice: object, fields: dict[str, Any]
) -> None:
    served = await serve_tools(saying(PARIS))
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    response = await served.chat(tools=[strict, TIME], tool_choice=choice, **fields)
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammars, grammar = grammars_of(), with_grammar(served)
    assert follows(grammars, grammar, PARIS)
    assert follows(grammars, grammar, called("get_time", "{}")) == (choice != NAMED)
    assert not follows(grammars, grammar, called("get_weather", '{"town": "Paris"}'))
    assert not follows(grammars, grammar, called("get_whether", "{}"))
    assert follows(grammars, grammar, "Well.") == (choice == "auto" and not fields)
    assert follows(grammars, grammar, ANSWER) == (choice == "auto")


async def test_calls_that_must_not_be_parallel_are_one_at_a_time(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    for parallel in (True, False):
        await served.chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=parallel)
        assert follows(grammars_of(), with_grammar(served), f"{PARIS}\n{PARIS}") == parallel


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
async def test_other_forms_cannot_be_combined_with_calls(serve_tools: CallingServing, choice: object) -> None:
    served = await serve_tools(saying(PARIS))
    given: dict[str, Any] = {"structured_outputs": {"regex": "a+"}}
    assert_error(
        await served.chat(tools=[WEATHER], tool_choice=choice, **given), status=400, param="structured_outputs.regex"
    )
    assert (await served.chat(tools=[WEATHER], tool_choice="none", **given)).status_code == 200


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": AS_SCHEMA}])
async def test_parameters_that_cannot_be_enforced_are_named(
    serve_tools: CallingServing, fields: dict[str, Any]
) -> None:
    served = await serve_tools(saying(PARIS))
    wrong = {"type": "object", "properties": {"city": {"type": "string", "not": {"pattern": "x"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    response = await served.chat(tools=[WEATHER, tool], **fields)
    assert_error(response, status=400, param="tools[1].function.parameters")
    message = response.json()["error"]["message"]
    assert "'f'" in message
    assert "properties.city.not" in message
    assert served.engine.requests == []
    assert (await served.chat(tools=[WEATHER, tool])).status_code == 200  # nothing is enforced for it


async def test_tools_whose_grammar_would_be_too_large_are_refused(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS), tools=FORMATS["qwen3_coder"])
    served.engine.info = fake_info(max_model_len=100_000)
    properties = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/b"}} for i in range(300)}
    parameters = {
        "type": "object",
        "properties": properties,
        "$defs": {"b": {"enum": ["x" * 1000]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = (await served.chat(tools=[tool], tool_choice="required")).json()["error"]
    assert (error["param"], error["code"]) == ("tools[0].function.parameters", "invalid_grammar")
    assert "'f'" in error["message"]


async def test_only_a_schema_that_is_enforced_is_named_as_the_fault(serve_tools: CallingServing) -> None:
    """The error used to name a tool that cannot be called, or a form of content although a call is required."""
    served = await serve_tools(saying(PARIS))
    tools = [{"type": "function", "function": {"name": name, "parameters": {"not": {}}}} for name in ("f", "g")]
    chosen = {"type": "function", "function": {"name": "g"}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"not": {}}}}
    response = await served.chat(tools=tools, tool_choice=chosen, response_format=form)
    assert_error(response, status=400, param="tools[1].function.parameters")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": '{"type": '}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, None),
    ],
)
async def test_a_form_that_cannot_be_enforced_with_tools_is_named(
    serve_tools: CallingServing, fields: dict[str, Any], param: str | None
) -> None:
    served = await serve_tools(saying(PARIS))
    response = await served.chat(tools=[WEATHER], **fields)
    assert_error(response, status=400, param=param or "response_format")
    assert "tools" not in response.json()["error"]["message"]


async def test_reasoning_is_allowed_before_a_form_or_a_call(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(f"<think>Hm.</think>{ANSWER}"))
    response = await served.chat(tools=[WEATHER], response_format=AS_SCHEMA)
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning"], json.loads(message["content"])) == ("Hm.", {"a": 1})
    grammar = served.engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert follows(grammars_of(), grammar, f"<think>Hm.</think>{ANSWER}")
    assert follows(grammars_of(), grammar, f"<think>Hm.</think>{PARIS}")
