"""Forms that a request can require of its answers, and refusals. The engine is scripted, so tests see its requests."""

import asyncio
import json
from typing import Any

import pytest

from motet.grammar.limits import MAX_OPTIONAL
from motet.types import Grammar, GrammarKind
from tests.api.serving import MODEL, Served, Serving, WatchedEngine
from tests.error_response import assert_error

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SOURCE = json.dumps(SCHEMA, separators=(",", ":"))
CLOSED = SOURCE.removesuffix("}") + ',"additionalProperties":false}'
OPEN = '"additionalProperties":true}'


def chat(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": MESSAGES, **fields}


def completion(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "hi", **fields}


def generate(**sampling: object) -> dict[str, object]:
    return {"model": MODEL, "token_ids": [5, 6], "sampling_params": {"max_tokens": 4, **sampling}}


def json_schema(schema: object = SCHEMA, name: str = "answer") -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True, "description": "x"}}


pytestmark = pytest.mark.anyio

BODIES = [(CHAT, chat), (COMPLETIONS, completion), (GENERATE, generate)]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), BODIES[:2])
@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"regex": "[ab]+"}, Grammar(GrammarKind.REGEX, "[ab]+")),
        ({"ebnf": 'root ::= "a"'}, Grammar(GrammarKind.LARK, 'root ::= "a"')),
        ({"regex": None, "ebnf": None}, None),
    ],
)
async def test_sglangs_fields_reach_the_engine(
    serve: Serving, path: str, body: Any, given: dict[str, object], grammar: Grammar | None
) -> None:
    served = await serve(engine=WatchedEngine())
    assert (await served.http.post(path, json=body(**given))).status_code == 200
    (request,) = served.engine.requests
    assert request.sampling.grammar == grammar


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), BODIES[:2])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"regex": "a", "response_format": json_schema()}, "regex"),
        ({"ebnf": 'root ::= "a"', "structured_outputs": {"regex": "a"}}, "ebnf"),
        ({"regex": "("}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"ebnf": ""}, "ebnf"),
    ],
)
async def test_wrong_values_of_sglangs_fields_are_named(
    served: Served, path: str, body: Any, given: dict[str, object], param: str
) -> None:
    assert_error(await served.http.post(path, json=body(**given)), status=400, param=param)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json": SCHEMA}, Grammar(GrammarKind.JSON, CLOSED)),
        ({"json": SOURCE}, Grammar(GrammarKind.JSON, CLOSED)),
        ({"json_object": True}, Grammar(GrammarKind.JSON, '{"type":"object"}')),
        ({"regex": "[ab]+"}, Grammar(GrammarKind.REGEX, "[ab]+")),
        ({"choice": ["yes", "no"]}, Grammar(GrammarKind.CHOICE, '["yes", "no"]')),
        ({"grammar": 'root ::= "a"'}, Grammar(GrammarKind.LARK, 'root ::= "a"')),
        ({"regex": "a", "disable_any_whitespace": False, "json": None}, Grammar(GrammarKind.REGEX, "a")),
    ],
)
async def test_structured_outputs_reach_the_engine(
    serve: Serving, path: str, body: Any, given: object, grammar: Grammar
) -> None:
    served = await serve(engine=WatchedEngine())
    assert (await served.http.post(path, json=body(structured_outputs=given))).status_code == 200
    assert [request.sampling.grammar for request in served.engine.requests] == [grammar]


@pytest.mark.parametrize(("path", "body"), BODIES[:2])
@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (json_schema(), Grammar(GrammarKind.JSON, CLOSED)),
        ({"type": "json_object"}, Grammar(GrammarKind.JSON, '{"type":"object"}')),
        ({"type": "json_object", "schema": SCHEMA}, Grammar(GrammarKind.JSON, CLOSED)),
        ({"type": "text"}, None),
    ],
)
async def test_response_format_reaches_the_engine(
    serve: Serving, path: str, body: Any, given: object, grammar: Grammar | None
) -> None:
    served = await serve(engine=WatchedEngine())
    assert (await served.http.post(path, json=body(response_format=given))).status_code == 200
    assert [request.sampling.grammar for request in served.engine.requests] == [grammar]


@pytest.mark.parametrize(
    ("additional_properties", "fields", "source"),
    [
        (True, {"response_format": json_schema()}, SOURCE),
        (True, {"structured_outputs": {"json": SCHEMA}}, SOURCE),
        (True, {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, CLOSED),
        (False, {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}}, CLOSED),
        (False, {"response_format": json_schema(SCHEMA | {"additionalProperties": True})}, f"{SOURCE[:-1]},{OPEN}"),
    ],
)
async def test_objects_stay_open_if_the_server_or_the_schema_requests_it(
    serve: Serving, additional_properties: bool, fields: dict[str, object], source: str
) -> None:
    served = await serve(additional_properties=additional_properties)
    assert (await served.http.post(CHAT, json=chat(**fields))).status_code == 200
    assert served.engine.requests[0].sampling.grammar == Grammar(GrammarKind.JSON, source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": json_schema({"type": "object", "properties": {"a": {"contains": {"const": 1}}}})},
            "response_format",
            "Invalid schema for response_format 'answer': at properties.a.contains: the keyword 'contains' is "
            "supported only if it has the schema of 'items', or allows everything; leave it out, and check the answer "
            "for it instead.",
        ),
        (
            {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "text"}}}}},
            "structured_outputs.json",
            "Invalid 'structured_outputs.json': at properties.a.type: 'text' is not a type",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs.grammar", "unknown name"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "it is not valid JSON"),
        (  # a process compiles it first
            {"structured_outputs": {"json": {"type": "object", "patternProperties": {"^(": {"type": "null"}}}}},
            "structured_outputs.json",
            "unclosed group",
        ),
        ({"structured_outputs": {"disable_additional_properties": True}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "too short"),
        ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs.choice", "not valid Unicode"),
        ({"structured_outputs": {"json": '"\ud800"'}}, "structured_outputs.json", "not valid Unicode"),
        ({"structured_outputs": {"json": {"const": "\ud800"}}}, "structured_outputs.json", "not valid Unicode"),
        ({"structured_outputs": {"regex": "a"}, "response_format": json_schema()}, "structured_outputs", "both"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "type 'text'"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema", "an object"),
        ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "response_format.schema", "not a type"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
            None,
            "type 'json_object'",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "Supported values"),
        ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name", "pattern"),
        ({"guided_json": {}}, "guided_json", "'guided_json' is now 'structured_outputs': {'json': ...}."),
        ({"guided_choice": ["a"]}, "guided_choice", "is now 'structured_outputs': {'choice': ...}."),
    ],
)
async def test_a_form_that_cannot_be_enforced_is_refused_with_its_place(
    refusing: Served, fields: dict[str, object], param: str | None, words: str
) -> None:
    answer = await refusing.http.post(
        CHAT, content=json.dumps(chat(**fields)), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert param is None or error["param"] == param


async def test_a_schema_that_is_nested_too_deeply_is_refused(served: Served) -> None:
    deep = '{"items":' * 3000 + "{}" + "}" * 3000
    body = json.dumps(chat(response_format=json_schema("here"))).replace('"here"', deep)
    assert (await served.http.post(CHAT, content=body, headers={"content-type": "application/json"})).status_code == 400


@pytest.mark.slow
async def test_others_are_answered_while_a_wide_schema_is_compiled(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine())
    wide = {f"p{i}": {"type": "integer"} for i in range(MAX_OPTIONAL)}
    schema = {"type": "object", "properties": {f"o{i}": {"type": "object", "properties": wide} for i in range(6)}}
    hard = chat(response_format=json_schema(schema))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(served.http.post(CHAT, json=hard))
        others = [await served.http.post(CHAT, json=chat()) for _ in range(3)]
        assert not first.done()
    assert [answer.status_code for answer in (*others, first.result())] == [200] * 4
    assert [request.sampling.grammar is None for request in served.engine.requests] == [True] * 3 + [False]


HOSTILE = [
    {"pattern": "(a{1,1000}){1,1000}"},
    {"pattern": "(" * 5000},
    {"minLength": 10**9},
    {"maxItems": 10**9, "items": {"type": "integer"}},
    {"enum": [{"a": i, "b": [i]} for i in range(500)]},
    {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(12)]},
    {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(4000)}},
    {"multipleOf": 999_999_937, "type": "integer"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"properties": {f"p{i}": {} for i in range(10_000)}},
]


FAR = pytest.param(6, marks=pytest.mark.slow)
"""The schema is followed to its end, which takes a second."""


@pytest.mark.parametrize("number", [FAR if number == 6 else number for number in range(len(HOSTILE))])
async def test_a_hostile_schema_is_enforced_or_refused_and_the_server_keeps_running(
    served: Served, number: int
) -> None:
    answer = await served.http.post(CHAT, json=chat(response_format=json_schema(HOSTILE[number])))
    if answer.status_code != 200:
        assert_error(answer, status=400, param="response_format")
        assert answer.json()["error"]["code"] in ("invalid_grammar", "invalid_value")
    assert (await served.http.post(CHAT, json=chat())).status_code == 200
