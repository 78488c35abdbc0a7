"""An error names the wrong field by the client's name, at any depth of the body and on any route."""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.api.serving import Served

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object"}
TOOL = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
NAMED = {"type": "function", "function": {"name": "f"}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
TURNS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "tool_calls": CALLS}]
TEXT = {"type": "input_text", "text": "hi"}
THOUGHT = {"type": "reasoning", "content": [{"type": "text", "text": "t"}]}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": [TEXT]}
STREAM: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
HELD: dict[str, object] = {"structured_outputs": {"json": SCHEMA}, **STREAM}
FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOOL_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]}],
    },
]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": TURNS,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        **HELD,
    },
    COMPLETIONS: {"prompt": "x", "response_format": FORMAT, **STREAM},
    GENERATE: {"token_ids": [5, 6], "sampling_params": {"structured_outputs": {"regex": "a"}}, **STREAM},
    RESPONSES: {
        "input": [{"type": "message", "role": "user", "content": [TEXT]}, THOUGHT, OUTPUT],
        "text": {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "stream": True,
        "stream_options": {},
    },
    MESSAGES: {
        "system": [{"type": "text", "text": "s"}],
        "messages": TOOL_BLOCKS,
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": False}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "max_tokens": 2000,
    },
    "/tokenize": {"messages": TURNS, "tools": [{"type": "function", "function": TOOL}], "tool_choice": NAMED},
}
SURROGATE = {"const": "\ud800"}
OWN: dict[str, list[tuple[str, Any]]] = {
    CHAT: [
        ("messages[0].role", None),
        ("messages[0].audio", {}),
        ("messages[1].function_call", {}),
        ("messages[0].content[0].text", None),
        ("messages[0].content[0]", {"type": "image_url", "image_url": {"url": "x"}}),
        ("messages[1].tool_calls[0].type", "custom"),
        ("messages[1].tool_calls[0].function.name", None),
        ("tools[0].function.parameters", SURROGATE),
        ("tools[0].function.parameters", {"type": "string"}),
        ("tool_choice.function", {"name": "f"}),
        ("tool_choice.allowed_tools.tools[0].function.name", "g"),
        ("structured_outputs", {"disable_additional_properties": True}),
        ("structured_outputs.structural_tag", "x"),
        ("structured_outputs.disable_any_whitespace", True),
        ("structured_outputs.json", SURROGATE),
    ],
    COMPLETIONS: [
        ("response_format.json_schema", None),
        ("response_format.json_schema.schema", SURROGATE),
    ],
    GENERATE: [
        ("sampling_params.guided_json", {}),
        ("sampling_params.n", 1000),
        ("sampling_params.stop_token_ids", [10**6]),
        ("sampling_params.logit_bias", {"x": 1}),
        ("sampling_params.min_tokens", 10**6),
        ("sampling_params.structured_outputs", {"disable_additional_properties": True}),
        ("sampling_params.structured_outputs", {"regex": "a", "json_object": True}),
        ("sampling_params.structured_outputs.whitespace_pattern", "x"),
        ("sampling_params.structured_outputs.disable_any_whitespace", True),
        ("sampling_params.structured_outputs.regex", "\ud800"),
        ("sampling_params.structured_outputs.regex", "("),
    ],
    RESPONSES: [
        ("input[0].content[0].text", None),
        ("input[1].encrypted_content", "x"),
        ("input[2].caller", {}),
        ("tools[0].async", True),
        ("tools[0].output_schema", {}),
        ("tools[0].parameters", SURROGATE),
        ("tool_choice.tools[0].name", "g"),
        ("text.format.schema", SURROGATE),
        ("stream_options.continuous_usage_stats", True),
    ],
    MESSAGES: [
        ("system[0].text", None),
        ("system[0].type", "image"),
        ("messages[0].content[0].type", "image"),
        ("messages[0].content[0].type", "document"),
        ("messages[0].content[0].text", None),
        ("messages[0].content", []),
        ("messages[0].content", None),
        ("messages[1].content[0].thinking", None),
        ("messages[1].content[1].id", None),
        ("messages[1].content[1].input", None),
        ("messages[1].content[1].input", "{}"),
        ("messages[1].content[1].input", SURROGATE),
        ("messages[1].content[1].caller", {}),
        ("messages[2].content[0].tool_use_id", None),
        ("messages[2].content[0].content[0].type", "image"),
        ("tools[0].input_schema", None),
        ("tools[0].input_schema", SURROGATE),
        ("tools[0].input_schema", {"type": "string"}),
        ("tools[0].name", "no good"),
        ("tools[0].type", "web_search_20250305"),
        ("tools[0].defer_loading", True),
        ("tools[0].allowed_callers", ["code_execution_20250825"]),
        ("tools[0].input_examples", []),
        ("tool_choice.name", "g"),
        ("tool_choice.name", None),
        ("thinking.budget_tokens", None),
        ("thinking.budget_tokens", 1023),
        ("thinking.budget_tokens", 2000),
        ("output_config.format.schema", SURROGATE),
    ],
}
"""Mistakes that only the check of one object finds."""
CLIENTS_OWN = {"parameters", "schema", "json", "input", "input_schema"}
"""Fields whose members can have any names."""


def members(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yields a wrong value for each member of inner objects, by its full name, and an unknown member of each."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        full = f"{name}[{step}]" if isinstance(step, int) else f"{name}.{step}".removeprefix(".")
        if isinstance(value, dict) and name:
            yield full, 1.5
        if step not in CLIENTS_OWN:
            yield from members(inner, full)
    if isinstance(value, dict) and name:
        yield f"{name}.unheard_of", 1


def open_to_clients(name: str) -> bool:
    """Returns True for an unknown field in a message, an item or a tool."""
    return name.endswith(".unheard_of") and name.startswith(("messages[", "input[", "tools[", "system["))


def of_allowed_tool(name: str) -> bool:
    """Returns True for an unknown field of an allowed tool, which can have its complete definition."""
    return name.endswith(".unheard_of") and name.startswith(("tool_choice.allowed_tools.tools[", "tool_choice.tools["))


def spoilt(body: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
    """Returns the body with this value at this place."""
    changed: Any = json.loads(json.dumps(body))
    inner, *steps = changed, *name.replace("[", ".[").split(".")
    keys = [int(step[1:-1]) if step.startswith("[") else step for step in steps]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return dict(changed)


@pytest.mark.slow
@pytest.mark.parametrize("route", BODIES)
async def test_a_mistake_inside_a_body_is_named_by_its_full_path(refusing: Served, route: str) -> None:
    given = members(BODIES[route])
    mistakes = [(name, value) for name, value in given if not (open_to_clients(name) or of_allowed_tool(name))]
    for name, value in [*mistakes, *OWN.get(route, [])]:
        body = json.dumps(spoilt(BODIES[route], name, value))
        answer = await refusing.http.post(route, content=body, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        if route == MESSAGES:  # its errors have no member for the field
            assert f"'{name}'" in error["message"] or error["message"].startswith(f"{name}: "), (name, value, error)
            continue
        assert error["param"] == name, error
        assert f"'{name}'" in error["message"] or error["message"].startswith("Invalid value: "), error["message"]


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
async def test_unknown_fields_of_messages_items_and_tools_are_ignored_and_logged_once(
    served: Served, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [name for name, _ in members(BODIES[route]) if open_to_clients(name)]
    body: dict[str, Any] = {
        str(name): BODIES[route][name]
        for name in ("system", "messages", "input", "tools", "max_tokens")
        if name in BODIES[route]
    }
    plain = await served.http.post(route, json=body)
    for name in names:
        body = spoilt(body, name, {"\x1b[2J": "x" * 300})
    with caplog.at_level(logging.DEBUG, "motet.api"):
        answer = await served.http.post(route, json=body, headers={"x-request-id": "r-1"})
    assert answer.status_code == plain.status_code == 200, answer.text
    first, second = served.engine.requests
    assert (first.prompt, first.sampling) == (second.prompt, second.sampling)
    (line,) = [vars(record)["fields"] for record in caplog.records if "ignored" in record.message]
    assert line == {"request_id": "r-1", "route": route, "ignored": ", ".join(names)}


async def test_the_line_about_ignored_fields_is_bounded(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "motet.api"):
        message = {"role": "user", "content": "hi"} | {f"{number}{'x' * 1000}": 1 for number in range(100)}
        assert (await served.http.post(CHAT, json={"messages": [message]})).status_code == 200
    (line,) = [vars(record)["fields"] for record in caplog.records if "ignored" in record.message]
    assert line["ignored"].startswith("messages[0].0xx") and line["ignored"].endswith(", ...")
    assert len(line["ignored"]) < 3_000


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
async def test_a_field_about_experts_is_ignored_with_a_line(
    served: Served, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainers send the field with every request; Motet's answers have no data about routed experts."""
    name = "routed_experts_prompt_start"
    body = dict(BODIES[route])
    if route == GENERATE:
        name, body["sampling_params"] = f"sampling_params.{name}", {**body["sampling_params"], name: 3}
    else:
        body[name] = 3
    with caplog.at_level(logging.DEBUG, "motet.api"):
        assert (await served.http.post(route, json=body)).status_code == 200
    (line,) = [vars(record)["fields"] for record in caplog.records if "ignored" in record.message]
    assert name in line["ignored"].split(", ")
