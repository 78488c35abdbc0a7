"""`GET /openapi.json` describes the routes correctly."""

from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from motet.api.http.routes import PostRoute
from tests.api.calling import PARIS, WEATHER, CallingServing
from tests.api.serving import Served, Serving, saying

pytestmark = pytest.mark.anyio

BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
                {"role": "assistant", "content": "ho", "tool_calls": None, "name": None},
                {"role": "tool", "content": "1", "tool_call_id": "1", "cache_control": {}},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
            "n": 2,
            "stop": "END",
            "logit_bias": {"5": -1},
            "response_format": {"type": "text"},
            "user": "u",
            "modalities": ["text"],
            "stream_options": {"include_usage": True},
            "stream": True,
        },
    ),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "stop": ["END"], "echo": True, "structured_outputs": {"json": "{}"}}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}], "text": {"format": {"type": "text"}}}),
    ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": "hi"}]}),
    (
        "/v1/messages",
        {
            "system": "s",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "max_tokens": 3,
            "metadata": {},
            "service_tier": "auto",
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/score", {"prompt": "hi", "continuations": ["a", [5, 6]], "n": 1, "user": "u", "priority": 1}),
    (
        "/v1/decisions",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "questions": [
                {"type": "predicate", "instructions": "Is it?", "name": None},
                {"type": "choice", "instructions": "Who?", "choices": [{"value": True}, {"value": False}]},
                {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}], "name": "x"},
            ],
            "safety_identifier": "u",
        },
    ),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 2, "max_tokens": 3}}),
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "tool_choice": "none"}),
    ("/detokenize", {"tokens": [5]}),
]


async def document(served: Served) -> dict[str, Any]:
    document_json: dict[str, Any] = (await served.http.get("/openapi.json")).json()
    return document_json


def schema_of(document: Mapping[str, Any], path: str) -> dict[str, Any]:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**body, "components": document["components"]}


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_body_that_is_answered_fits_its_schema(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(body, schema_of(await document(served), path))


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_body_with_an_unknown_field_fits_neither(served: Served, path: str, body: dict[str, Any]) -> None:
    wrong = {**body, "nonsense": 1}
    assert (await served.http.post(path, json=wrong)).status_code == 400
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema_of(await document(served), path))


async def test_every_route_is_in_it_but_those_between_servers(served: Served) -> None:
    paths = (await document(served))["paths"]
    listed = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    posts = {(route.path, "POST") for route in served.app.routes if isinstance(route, PostRoute)}
    assert posts < listed
    assert {("/v1/models", "GET"), ("/status", "GET"), ("/drain", "POST"), ("/workers/{id}", "DELETE")} < listed
    assert not any(path.startswith("/engine") for path in paths)
    assert "/v1/responses/{response_id}" not in paths


@pytest.mark.slow
async def test_the_document_says_if_a_key_is_needed(served: Served, serve: Serving) -> None:
    assert "security" not in await document(served)
    guarded = await serve(api_keys=("secret",))
    assert (await guarded.http.get("/openapi.json")).status_code == 401
    document_json = (await guarded.http.get("/openapi.json", headers={"authorization": "Bearer secret"})).json()
    assert document_json["security"] == [{"key": []}]
    assert document_json["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


async def test_its_errors_have_the_shape_of_errors(served: Served) -> None:
    document_json = await document(served)
    for methods in document_json["paths"].values():
        for operation in methods.values():
            success, *errors = operation["responses"]
            assert (success[0], errors) == ("2", ["4XX", "5XX"])
    for path in ("/tokenize", "/v1/messages"):
        answer = document_json["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
        schema = {**answer, "components": document_json["components"]}
        jsonschema.validate((await served.http.post(path, json={})).json(), schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({}, schema)


async def test_a_message_of_an_answer_fits_the_schema_of_messages(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    turn = {"role": "user", "content": "hi"}
    (choice,) = (await served.chat(tools=[WEATHER])).json()["choices"]
    assert choice["message"]["content"] is None
    body = {"messages": [turn, choice["message"], {"role": "tool", "content": "rain", "tool_call_id": "1"}]}
    assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
    jsonschema.validate(body, schema_of(await document(served), "/v1/chat/completions"))


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_null_is_the_same_as_no_value(served: Served, path: str, body: dict[str, Any]) -> None:
    """`content: null` next to `tool_calls`, as this server sends it, did not fit the schema of a message."""
    described = await document(served)
    own = described["components"]["schemas"][schema_of(described, path)["$ref"].rpartition("/")[2]]
    nulls = dict.fromkeys(own["properties"].keys() - body.keys() - {*own.get("required", ())})
    assert (await served.http.post(path, json=body | nulls)).status_code == 200
    jsonschema.validate(body | nulls, schema_of(described, path))
