"""docs/api.md says what is read, ignored and refused."""

from pathlib import Path

import pytest

from motet.api.schema_chat import ChatRequest
from motet.api.schema_completion import CompletionRequest
from motet.api.schema_generate import GenerateSampling, TokensRequest
from motet.api.schema_message import CalledFunction, CalledTool, Message
from motet.api.schema_shared import Schema, StreamOptions
from motet.api.schema_tokenize import TokenizeBody
from motet.text.reasoning import FAMILIES, GPT_OSS
from motet.text.tools.formats import FORMATS
from motet.text.tools.harmony import HARMONY
from tests.api.serving import Served

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
IGNORED = PAGE.partition("### Ignored fields")[2].partition("### Refused fields")[0]
REFUSED = PAGE.partition("### Refused fields")[2].partition("## Streams")[0]
PARSERS = PAGE.partition("## Tools")[2].partition("## Streams")[0]

every_schema = pytest.mark.parametrize(
    "schema",
    [
        ChatRequest,
        CompletionRequest,
        GenerateSampling,
        TokensRequest,
        TokenizeBody,
        StreamOptions,
        Message,
        CalledTool,
        CalledFunction,
    ],
)


@every_schema
def test_every_field_that_is_read_is_described(schema: type[Schema]) -> None:
    assert [name for name in schema.model_fields if f"`{name}`" not in PAGE and name != "refusal"] == []


@every_schema
def test_every_ignored_field_is_listed(schema: type[Schema]) -> None:
    listed = (
        IGNORED.replace("stream_options.", "")
        .replace("messages[].", "")
        .replace("tool_calls[].", "")
        .replace("function.", "")
    )
    assert [name for name in schema.ignored if f"`{name}`" not in listed] == []


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_every_value_that_asks_for_nothing_is_listed(schema: type[Schema]) -> None:
    passing = [name for name, values in schema.neutral.items() if values]
    assert [name for name in passing if f"`{name}" not in REFUSED] == []


def test_every_parser_is_listed() -> None:
    named = [*FORMATS, HARMONY.name, GPT_OSS, *(name for tags in FAMILIES for name in tags.names)]
    assert [name for name in named if f"`{name}`" not in PARSERS] == []


@pytest.mark.anyio
async def test_every_route_is_listed_and_exists(served: Served) -> None:
    paths = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/version"),
        ("GET", "/status"),
        ("GET", "/metrics"),
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("DELETE", "/workers/{id}"),
        ("POST", "/workers/{id}/drain"),
        ("POST", "/drain"),
        ("GET", "/engine"),
        ("POST", "/engine/generate"),
        ("POST", "/engine/release"),
        ("POST", "/engine/stop"),
        ("POST", "/engine/connect"),
    ]
    for method, path in paths:
        assert f"`{method} {path}`" in PAGE
        response = await served.http.request(method, path)
        assert response.status_code != 405
        assert response.status_code != 404 or response.json()["error"]["code"] == "fixed_workers"
