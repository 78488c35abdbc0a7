"""Arguments that are plain text get their types from the tool's schema."""

import json
from collections.abc import Mapping

import pytest

from motet.text.formats import FORMATS
from motet.text.tools.argument_schema import types_of_argument
from motet.text.tools.cursor import Cursor
from motet.text.tools.tool_format import Tool
from motet.text.tools.typed import as_json, types_of

ROOT = {
    "properties": {
        "unit": {"$ref": "#/$defs/Unit"},
        "again": {"$ref": "#/properties/again"},
        "lost": {"$ref": "https://example.com/unit.json"},
    },
    "$defs": {"Unit": {"enum": ["c", 1, None]}, "a/b": {"type": "boolean"}},
}
UNIT = {"$ref": "#/$defs/Unit"}
ANY = {"string", "number", "integer", "boolean", "object", "array", "null"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"const": 2.5}, {"number"}),
        (
            {"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}, {"const": True}]}]},
            {"string", "null", "boolean"},
        ),
        (UNIT, {"string", "integer", "number", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/properties/again"}, ANY),
        ({"anyOf": [UNIT, {"$ref": "#/$defs/a~1b"}, UNIT]}, ANY - {"object", "array"}),
        ({"$ref": "https://example.com/unit.json"}, ANY),
        ({}, ANY),
        ({"type": "float"}, ANY),
        ({"anyOf": [{}]}, ANY),
        ({"anyOf": 3, "type": {}}, ANY),
    ],
)
def test_a_schema_gives_the_types_of_a_value(schema: Mapping[str, object], types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("42", {"string"}, "42"),
        ("42", {"integer"}, 42),
        ("42", {"number"}, 42),
        ("2.0", {"integer"}, 2.0),
        ("2.5", {"integer"}, "2.5"),
        (" 42\n", {"integer"}, 42),
        ("forty", {"integer"}, "forty"),
        ("true", {"boolean"}, True),
        ("False", {"boolean"}, False),
        ("False", {"string", "boolean"}, False),
        ("None", {"string"}, "None"),
        ("None", {"integer", "null"}, None),
        ("null", {"string", "null"}, None),
        ("42", {"string", "null"}, "42"),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("{'a': (1, None)}", {"object"}, {"a": [1, None]}),
        ("{'a': 1}", {"string"}, "{'a': 1}"),
        ("{'a': ", {"object"}, "{'a': "),
        ("{'a': {1}}", {"object"}, "{'a': {1}}"),
        ("[" * 5000, {"array"}, "[" * 5000),
        ("NaN", {"number"}, "NaN"),
        ('"quoted"', {"integer"}, "quoted"),
        ('"quoted"', {"string", "null"}, '"quoted"'),
        ("", {"string"}, ""),
        ("", {"integer"}, ""),
        ("['\\ud800']", {"array"}, "['\\ud800']"),
    ],
)
def test_a_text_becomes_a_value_of_an_allowed_type(text: str, types: set[str], value: object) -> None:
    encoded = as_json(text, frozenset(types))
    assert json.loads(encoded) == value
    assert type(json.loads(encoded)) is type(value)


def test_each_of_many_circular_references_is_followed_once() -> None:
    """The bug: a step for each path through the references blocked the event loop practically for ever."""
    names = [f"p{i}" for i in range(50)]
    parts = [{"$ref": f"#/$defs/{name}"} for name in names]
    root = {"$defs": {name: {"anyOf": [*parts, {"type": "null"}]} for name in names}}
    assert types_of(parts[0], root) == {"null"}


def test_an_argument_has_the_types_of_all_schemas_that_apply_to_it() -> None:
    unit = {"$ref": "#/$defs/Unit"}
    parameters: list[tuple[Mapping[str, object], set[str]]] = [
        ({"properties": {"p": unit}}, {"string", "integer", "number", "null"}),
        ({"properties": {"p": {**unit, "type": "string"}}}, {"string"}),
        ({"properties": {"p": {"allOf": [unit, {"type": ["string", "boolean"]}]}}}, {"string"}),
        ({"properties": {"p": True}, "allOf": [{"properties": {"p": {"type": "string"}}}]}, {"string"}),
        ({"$ref": "#/$defs/Tool"}, {"number"}),
        ({"properties": {"p": True}, "patternProperties": {"p": {"type": "array"}}}, {"array"}),
        ({"required": ["p"], "additionalProperties": {"const": "a"}}, {"string"}),
        ({"properties": {"q": unit}}, ANY),
        ({"properties": {"p": unit}, "not": 1, "allOf": []}, ANY),
    ]
    shared = {"Unit": {"enum": ["c", 1, None]}, "Tool": {"properties": {"p": {"type": "number"}}}}
    for each, types in parameters:
        tool = Tool(name="f", parameters={**each, "$defs": shared}, strict=False)
        assert types_of_argument(tool, "p") == types


@pytest.mark.parametrize("parameters", [{}, {"properties": []}, {"properties": {"a": 3}}, {"properties": {"a": True}}])
def test_calls_are_parsed_even_if_the_schema_is_invalid(parameters: Mapping[str, object]) -> None:
    tool = Tool(name="f", parameters=parameters, strict=False)
    region = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    [call] = FORMATS["qwen3_coder"].parse(Cursor(region, final=True), [tool]).calls
    assert call.arguments == '{"a": 1}'


def test_a_string_is_streamed_except_for_a_possible_start_of_its_closing_tag() -> None:
    tool = Tool(name="f", parameters={"properties": {"a": {"type": "string"}}}, strict=False)
    head = "<function=f>\n<parameter=a>\n"
    sent_of = {
        "x = 1": "x = 1",
        "x\n": "x",
        "x\n</para": "x",
        "x </para": "x ",
        "x </pair": "x </pair",
        'say "é': 'say \\"é',
    }
    for text, sent in sent_of.items():
        [call] = FORMATS["qwen3_coder"].parse(Cursor(head + text), [tool]).calls
        assert (call.arguments, call.complete) == (f'{{"a": "{sent}', False)
