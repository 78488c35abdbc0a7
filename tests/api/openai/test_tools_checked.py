"""Mistakes about tools in a chat request."""

from typing import Any

import pytest

from motet.text.tools.tagged_formats import QWEN3_CODER
from tests.api.calling import PARIS, TIME, WEATHER, CallingServing
from tests.api.serving import Served, saying
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(serve_tools: CallingServing) -> Served:
    return await serve_tools(saying(PARIS))


def function(**fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def allowed(*names: str, mode: str = "auto") -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.mark.parametrize(
    ("tools", "param", "code"),
    [
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type", "invalid_value"),
        ([{"type": "function"}], "tools[0].function", "missing_required_parameter"),
        ([{"type": "function", "function": {}}], "tools[0].function.name", "missing_required_parameter"),
        ([function(name="")], "tools[0].function.name", "invalid_value"),
        ([function(name="get weather")], "tools[0].function.name", "invalid_value"),
        ([function(name="f\n")], "tools[0].function.name", "invalid_value"),
        ([function(name="f" * 129)], "tools[0].function.name", "invalid_value"),
        ([function(description="\ud800")], "tools[0].function.description", "invalid_value"),
        ([function(parameters={"minimum": float("inf")})], "tools[0].function.parameters", None),
        ([function(), function()], "tools[1].function.name", "invalid_value"),
        ([function(name=f"f{i}") for i in range(129)], "tools", "array_above_max_length"),
        ("f", "tools", "invalid_type"),
    ],
)
async def test_a_tool_is_refused_by_its_place(refusing: Served, tools: object, param: str, code: str | None) -> None:
    await assert_refused(refusing, {"tools": tools}, param, code)


@pytest.mark.parametrize(
    ("choice", "param", "code"),
    [
        ("sometimes", "tool_choice.type", "invalid_value"),
        (5, "tool_choice", "invalid_type"),
        (named("get_whether"), "tool_choice.function.name", "invalid_value"),
        ({"type": "function"}, "tool_choice.function", "missing_required_parameter"),
        ({"type": "function", "function": {}}, "tool_choice.function.name", "missing_required_parameter"),
        ({"type": "auto", "function": {"name": "get_time"}}, "tool_choice.function", "unknown_parameter"),
        (allowed(), "tool_choice.allowed_tools.tools", "array_below_min_length"),
        (allowed("get_time", "f"), "tool_choice.allowed_tools.tools[1].function.name", "invalid_value"),
        (allowed("get_time", mode="none"), "tool_choice.allowed_tools.mode", "invalid_value"),
    ],
)
async def test_a_choice_of_tools_is_refused_by_name(refusing: Served, choice: object, param: str, code: str) -> None:
    await assert_refused(refusing, {"tools": [WEATHER, TIME], "tool_choice": choice}, param, code)


@pytest.mark.parametrize("choice", ["required", named("get_time"), allowed("get_time")])
async def test_a_tool_cannot_be_chosen_if_there_are_none(refusing: Served, choice: object) -> None:
    await assert_refused(refusing, {"tool_choice": choice}, "tool_choice", "invalid_value")


async def test_tool_fields_without_effect_need_no_tools(served: Served) -> None:
    for fields in ({"tool_choice": "none"}, {"tool_choice": "auto", "tools": []}, {"parallel_tool_calls": False}):
        assert (await served.chat(**fields)).status_code == 200


async def test_a_model_without_a_call_parser_takes_no_tools(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS), tools=None)
    await assert_refused(served, {"tools": [WEATHER]}, "tools", "unsupported_parameter")
    assert (await served.chat(tools=[WEATHER], tool_choice="none")).status_code == 200


async def assert_refused(served: Served, fields: dict[str, Any], param: str, code: str | None) -> None:
    response = await served.chat(**fields)
    assert_error(response, status=400, param=param)
    if code is not None:
        assert_error(response, status=400, code=code)
    assert served.engine.requests == []


async def test_a_schema_that_the_format_of_calls_cannot_express_is_refused_by_its_place(
    serve_tools: CallingServing,
) -> None:
    properties = {"pattern": {"type": "string", "pattern": "^(?=a)"}}
    broken = function(parameters={"type": "object", "properties": properties}, strict=True)
    served = await serve_tools(saying(PARIS), tools=QWEN3_CODER)
    for fields in ({"tool_choice": "required"}, {}):
        response = await served.chat(tools=[TIME, broken], **fields)
        assert_error(response, status=400, param="tools[1].function.parameters", code="invalid_grammar")
        message = response.json()["error"]["message"]
        assert message.startswith(
            "Invalid schema for function 'f': at properties.pattern.pattern: '(?=' is not supported"
        )
    flat = {"type": "function", **broken["function"]}
    response = await served.http.post("/v1/responses", json={"input": "a", "tools": [flat], "tool_choice": "required"})
    assert_error(response, status=400, param="tools[0].parameters", code="invalid_grammar")
    assert (
        await served.chat(tools=[function(parameters={"type": "object", "properties": properties})])
    ).status_code == 200
