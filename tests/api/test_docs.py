"""docs/api.md and the pages next to it list all fields that are read, ignored and refused."""

import json
from pathlib import Path

import pytest

from motet.api.generation.request_fields import StreamOptions
from motet.api.http.schema import Schema
from motet.api.openai.chat_schema import CalledFunction, CalledTool, ChatRequest, Message
from motet.api.openai.completions import CompletionRequest
from motet.api.openai.models import TokenizeBody
from motet.api.vllm.generate import GenerateSampling, TokensRequest
from motet.text.formats import FORMATS
from motet.text.harmony import HARMONY
from motet.text.reasoning import FAMILIES, GPT_OSS
from motet.types import SAMPLING_FIELDS, VERBATIM_FIELDS, SamplingParams
from tests.api.serving import Served

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("api.md", "dialects.md", "token_ids.md", "status.md"))
FIELDS = PAGE.partition("## Fields")[2].partition("### Ignored fields")[0]
IGNORED = PAGE.partition("### Ignored fields")[2].partition("### Refused fields")[0]
OTHERS = PAGE.partition("## Fields of other servers")[2].partition("\n# ")[0]
REFUSED = PAGE.partition("### Refused fields")[2].partition("\n## ")[0] + OTHERS
PARSERS = PAGE.partition("## Tools")[2].partition("## Streams")[0]

SCHEMAS = (ChatRequest, CompletionRequest, GenerateSampling, TokensRequest, TokenizeBody, StreamOptions, Message)
every_schema = pytest.mark.parametrize("schema", [*SCHEMAS, CalledTool, CalledFunction])


@every_schema
def test_every_field_that_is_read_is_described(schema: type[Schema]) -> None:
    assert [name for name in schema.model_fields if f"`{name}`" not in PAGE and name != "refusal"] == []


@pytest.mark.parametrize("name", VERBATIM_FIELDS)
def test_a_sampling_field_is_described_with_its_range_and_default(name: str) -> None:
    rows = [line for line in FIELDS.splitlines() if line.startswith("| ")]
    (row,) = [line for line in rows if f"`{name}`" in line.split(" | ")[0]]
    _, ranged, default, where = [cell.strip() for cell in row.strip("|").split("|")]
    field, value = SAMPLING_FIELDS[name], getattr(SamplingParams(max_tokens=1), name)
    assert ranged.startswith("" if field.low is None else field.words)
    assert (default, where) == (f"{value:g}" if isinstance(value, float) else json.dumps(value), "all")


@every_schema
def test_every_ignored_field_is_listed(schema: type[Schema]) -> None:
    listed = IGNORED.replace("stream_options.", "")
    assert [name for name in schema.ignored if f"`{name}`" not in listed] == []


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_every_value_without_effect_is_listed(schema: type[Schema]) -> None:
    passing = [name for name, values in schema.neutral.items() if values]
    assert [name for name in passing if f"`{name}" not in REFUSED] == []


def test_every_parser_is_listed() -> None:
    named = [*FORMATS, HARMONY.name, GPT_OSS, *(name for tags in FAMILIES for name in tags.names)]
    assert [name for name in named if f"`{name}`" not in PARSERS] == []


@pytest.mark.anyio
async def test_the_example_of_status_has_exactly_the_fields_there_are(served: Served) -> None:
    status = (await served.http.get("/status")).json()
    example = json.loads(PAGE.partition("`GET /status` queries")[2].partition("```json")[2].partition("```")[0])
    (worker,) = example["workers"]
    assert worker.keys() == status["workers"][0].keys()
    assert example["totals"].keys() == status["totals"].keys()
    assert example.keys() == status.keys()


@pytest.mark.anyio
async def test_every_route_is_listed_and_exists(served: Served) -> None:
    routes = """
        POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, POST /v1/messages,
        POST /v1/messages/count_tokens, POST /v1/score, POST /v1/decisions, POST /inference/v1/generate,
        POST /tokenize, POST /detokenize, GET /v1/models, GET /health, GET /ping, POST /ping, GET /ready,
        GET /version, GET /status, GET /metrics, GET /workers, POST /workers, DELETE /workers/{id},
        POST /workers/{id}/drain, POST /drain, GET /engine, POST /engine/generate, POST /engine/release,
        POST /engine/stop, POST /engine/order"""
    for method, path in (route.split() for route in routes.split(",")):
        assert f"`{method} {path}`" in PAGE
        response = await served.http.request(method, path)
        assert response.status_code != 405
        assert response.status_code != 404 or response.json()["error"]["code"] == "fixed_workers"
