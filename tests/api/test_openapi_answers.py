"""The answers of every documented route are as `GET /openapi.json` describes them, and the document itself is valid."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis

from motet.api.service import Membership
from motet.engine import Worker
from motet.settings.named_worker import NamedWorker
from tests.api.noted_control import NotedControl
from tests.api.serving import Served, Serving, WatchedEngine
from tests.api.test_openapi import document

pytestmark = pytest.mark.anyio

Sent = dict[str, Any]
HI = {"messages": [{"role": "user", "content": "hi"}]}
TOKENS = {"token_ids": [5, 6]}
GENERATED = {"request_id": "r", "choices": [{"index": 0, "token_ids": [5], "finish_reason": "length"}]}
TENSORS: Sent = {"content": b"\x02\0\0\0\0\0\0\0{}", "headers": {"content-type": "application/octet-stream"}}
ANTHROPIC: Sent = {"headers": {"anthropic-version": "2023-06-01"}}

REQUESTS: dict[str, list[Sent]] = {
    "POST /v1/chat/completions": [
        {"json": HI},
        {"json": {**HI, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}},
        {"json": {**HI, "prompt_logprobs": 1}},
        {"json": {**HI, "stream": True}},
    ],
    "POST /v1/completions": [
        {"json": {"prompt": ["a", "b"], "n": 2}},
        {"json": {"prompt": [5, 6], "echo": True, "logprobs": 1, "return_token_ids": True, "prompt_logprobs": 0}},
        {"json": {"prompt": "a", "stream": True}},
    ],
    "POST /v1/responses": [
        {"json": {"input": "hi"}},
        {"json": {"input": "hi", "max_output_tokens": 1}},
        {"json": {"input": "hi", "stream": True}},
    ],
    "POST /v1/responses/input_tokens": [{"json": {"input": "hi"}}],
    "POST /v1/messages": [{"json": {**HI, "max_tokens": 9}}, {"json": {**HI, "max_tokens": 9, "stream": True}}],
    "POST /v1/messages/count_tokens": [{"json": HI}],
    "POST /v1/responses/render": [{"json": {"input": "hi"}}],
    "POST /v1/score": [
        {"json": {"prompt": [5, 6], "continuations": ["a", [7, 8]]}},
        {"json": {**HI, "continuations": ["a"]}},
    ],
    "POST /v1/decisions": [
        {"json": {"input": "hi", "questions": [{"type": "predicate", "instructions": "Is it?"}]}},
        {
            "json": {
                "input": "hi",
                "return_token_ids": True,
                "questions": [{"type": "choice", "instructions": "Who?", "choices": [{"value": "a"}, {"value": "b"}]}],
            }
        },
    ],
    "POST /inference/v1/generate": [
        {"json": TOKENS},
        {"json": {**TOKENS, "sampling_params": {"logprobs": 1, "prompt_logprobs": 1, "n": 2}}},
        {"json": {**TOKENS, "stream": True}},
    ],
    "POST /inference/v1/abort_requests": [{"json": {"request_ids": ["a"]}}],
    "POST /generate": [
        {"json": {"text": "hi"}},
        {"json": {"input_ids": [[5], [6]], "return_logprob": True}},
        {"json": {"text": "hi", "stream": True}},
    ],
    "POST /v1/chat/completions/render": [{"json": HI}],
    "POST /v1/completions/render": [{"json": {"prompt": ["a", "b"]}}],
    "POST /tokenize": [{"json": {"prompt": "hi"}}, {"json": {**HI, "return_token_strs": True}}],
    "POST /detokenize": [{"json": {"tokens": [5]}}],
    "POST /v1/messages/render": [{"json": {**HI, "max_tokens": 9}}],
    "POST /v1/chat/completions/derender": [
        {"json": {"generate_response": GENERATED}},
        {"json": {"generate_chunk": GENERATED, "stream": True}},
    ],
    "POST /v1/completions/derender": [
        {"json": {"generate_responses": [GENERATED]}},
        {"json": {"generate_chunk": GENERATED, "stream": True}},
    ],
    "GET /v1/models": [{}, ANTHROPIC],
    "GET /v1/models/{model}": [{}, ANTHROPIC],
    "POST /v1/groups/{id}/more": [{"json": {"n": 1}}, {"json": {"n": 1, "stream": True}}],
    "GET /metrics": [{}, {"headers": {"accept": "application/openmetrics-text"}}],
    "POST /workers": [{"json": {"url": "http://10.0.0.1:8000"}}],
    "POST /update_weights": [{"json": {"weight_dir": "/weights"}}, TENSORS],
    "POST /update_weight_version": [{"json": {"new_version": "7"}}],
    "POST /weight_checker": [
        {"json": {"action": "checksum"}},
        {"json": {"action": "compare", "baseline": {"a": "01"}}},
        {"json": {"action": "reset"}},
    ],
    "POST /init_weight_transfer_engine": [{"json": {"init_info": {}}}],
    "POST /abort_request": [{"json": {"abort_all": True}}],
    "POST /update_weights_from_disk": [{"json": {"model_path": "/weights"}}],
    "GET /server_info": [{}, {"params": {"config_format": "json"}}],
}
"""The requests for each route; a route without an entry gets one without a body."""
OF_VLLM = {"POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"}
"""Routes that need vLLM workers: `tests/deploy/test_adapters.py` compares their answers with the document."""
OF_BATCHES = ("/v1/files", "/v1/batches")
"""Start of the routes that need a folder: `tests/api/batches/test_documented.py` compares their answers."""
BEFORE = {"POST /finish_weight_update": ["/start_weight_update", "/update_weights"]}
"""Routes that must be called before."""


class KillableEngine(WatchedEngine):
    def kill(self) -> None:
        """Does nothing: the route only needs a process that it may end."""


@pytest.fixture
async def everything(serve: Serving, control: NotedControl) -> Served:
    """A server with all routes, and with an operator who may use them."""

    async def join(named: NamedWorker, id: str | None) -> str:
        return id or named.url

    async def leave(id: str, drain_s: float) -> None:
        assert (id, drain_s >= 0) == ("engine-0", True)

    async def drain(id: str) -> None:
        assert id == "engine-0"

    engine = KillableEngine()
    worker = Worker("engine-0", engine, "127.0.0.1:1", kill=engine.kill)
    changes = Membership(join, leave, drain)
    served = await serve(engine=engine, workers=[worker], membership=changes, rl=True, admin_key="boss")
    served.http.headers["authorization"] = "Bearer boss"
    served.service.control = control
    return served


def operations(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each documented route, as in `REQUESTS`, and what the document says about it."""
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


async def send(served: Served, route: str, sent: Sent) -> httpx.Response:
    method, path = route.split()
    if "/v1/groups/" in path:
        group = (await served.chat(keep_s=9)).json()["id"]
        path = path.replace("{id}", group).replace("{index}", "0")
    path = path.replace("{model}", "tiny").replace("{id}", "engine-0")
    for before in BEFORE.get(route, ()):
        assert (await served.http.post(before, **(TENSORS if before == "/update_weights" else {}))).status_code == 200
    return await served.http.request(method, path, **sent)


async def test_the_answers_of_every_route_are_as_documented(everything: Served) -> None:
    """The answers of `/metrics` were described as JSON, and no other answer was described."""
    described = await document(everything)
    routes = dict(operations(described))
    assert REQUESTS.keys() <= routes.keys()
    for route, operation in sorted(routes.items(), key=lambda one: one[0] == "POST /drain"):  # the last one
        elsewhere = route in OF_VLLM or route.split()[1].startswith(OF_BATCHES)
        for sent in () if elsewhere else REQUESTS.get(route, [{}]):
            answer = await send(everything, route, sent)
            status = str(answer.status_code)
            assert status in operation["responses"], (route, sent, answer.text)
            content = operation["responses"][status]["content"]
            kind = answer.headers["content-type"].partition(";")[0]
            assert kind in content, (route, sent, kind)
            if kind == "application/json":
                schema = {**content[kind]["schema"], "components": described["components"]}
                assert schema.keys() > {"components"}, f"{route} is missing in answer_schemas.py"
                jsonschema.Draft202012Validator(schema).validate(answer.json())


@pytest.mark.slow
async def test_the_document_is_valid(everything: Served) -> None:
    described = await document(everything)
    schemathesis.openapi.from_dict(described).validate()
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = [operation["operationId"] for _, operation in operations(described)]
    assert len({*ids}) == len(ids)
    names = {name.rpartition("/")[2] for name in re.findall(r'"#/components/schemas/(\w+)"', str(described))}
    assert names <= described["components"]["schemas"].keys()


async def test_every_name_in_a_path_is_a_parameter(everything: Served) -> None:
    """`/v1/groups/{id}` declared no `id`, so generated clients could not call it."""
    for route, operation in operations(await document(everything)):
        declared = [one["name"] for one in operation.get("parameters", []) if one["in"] == "path"]
        assert sorted(declared) == sorted(re.findall(r"{(\w+)}", route)), route


async def test_refusals_are_as_documented(everything: Served) -> None:
    described = await document(everything)
    for route, operation in operations(described):
        method, path = route.split()
        wrong = path.replace("{id}", "none").replace("{model}", "none").replace("{index}", "0")
        answer = await everything.http.request(method, wrong, content=b"{", headers={"content-type": "text/css"})
        if answer.status_code >= 400:
            documented = operation["responses"][f"{answer.status_code // 100}XX"]["content"]
            schema = {**documented["application/json"]["schema"], "components": described["components"]}
            jsonschema.Draft202012Validator(schema).validate(answer.json())
