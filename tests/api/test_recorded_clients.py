"""The recorded requests of third-party clients are answered.

`recorded_clients` has the recordings of `make clients`: the client, its version and the day, and its requests, with
long texts shortened. `tests/clients` runs the clients themselves."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from motet.testing.fake_engine import fake_info
from tests.api import messaging
from tests.api.calling import CallingServing, called
from tests.api.noted_control import NotedControl
from tests.api.responding import final, streamed, unstreamed
from tests.api.serving import MODEL, Served, Serving, WatchedEngine, chunks
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

FILES = sorted((Path(__file__).parent / "recorded_clients").glob("*.json"))
RECORDED: dict[str, list[dict[str, Any]]] = {file.stem: json.loads(file.read_text())["requests"] for file in FILES}
LONG = 200_000
"""Enough for Codex's prompt, in bytes."""
MAX_LOGPROBS = 100
"""Number of alternatives to the tokens of a prompt that TRL requests."""
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
UPDATE = "/update_weights"


class Answering:
    """Returns a script that generates `text` in every choice."""

    text = "fine"

    def __call__(self, *_: object) -> list[int]:
        return fake_answer(self.text)


@pytest.fixture
async def replaying(serve_tools: CallingServing) -> "Replaying":
    script = Answering()
    engine = WatchedEngine(script)
    engine.info = fake_info(max_model_len=LONG)
    return Replaying(await serve_tools(script, engine=engine, max_logprobs=MAX_LOGPROBS), script)


class Replaying:
    """Sends recorded requests to a server whose model answers in the form that the request requires."""

    def __init__(self, served: Served, script: Answering) -> None:
        self.served = served
        self.script = script

    async def send(self, path: str, body: dict[str, Any], text: str | None = None) -> httpx.Response:
        """Sends the body unchanged, except the model's name and token ids that the small vocabulary lacks."""
        self.script.text = fitting(path, body) if text is None else text
        body = body | {"model": MODEL}
        if isinstance(body.get("prompt"), list):
            body["prompt"] = [
                [token % 256 + 3 for token in prompt] if isinstance(prompt, list) else prompt
                for prompt in body["prompt"]
            ]
        response = await self.served.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response


def fitting(path: str, body: dict[str, Any]) -> str:
    """Returns a valid answer of the model: a call where one is required, otherwise an object of the schema."""
    if demands_call(body):
        return called(names_of_tools(body)[0], "{}")
    schema = schema_of(body)
    return "fine" if schema is None else json.dumps(dict.fromkeys(schema.get("properties", {})))


def demands_call(body: dict[str, Any]) -> bool:
    choice = body.get("tool_choice")
    return choice not in (None, "none", "auto") and choice != {"type": "auto"}


def schema_of(body: dict[str, Any]) -> dict[str, Any] | None:
    form = body.get("response_format") or (body.get("text") or body.get("output_config") or {}).get("format") or {}
    schema: dict[str, Any] | None = form.get("json_schema", form).get("schema")
    return schema


def names_of_tools(body: dict[str, Any]) -> list[str]:
    return [tool.get("function", tool)["name"] for tool in body["tools"] if tool.get("type", "function") == "function"]


@pytest.mark.parametrize("name", RECORDED)
async def test_every_request_of_a_client_is_answered(replaying: Replaying, name: str) -> None:
    assert RECORDED[name]
    for request in RECORDED[name]:
        path, body = request["path"], request["body"]
        if path == UPDATE:
            continue  # its tensors are in another request: a separate test sends both
        response = await replaying.send(path, body)
        if path in (CHAT, COMPLETIONS):
            check_choices(path, body, response)
        elif path == RESPONSES:
            answer = final(streamed(response)) if body.get("stream") else unstreamed(response)
            assert answer.status == "completed"
            assert answer.output_text or any(item.type == "function_call" for item in answer.output)
        elif path.partition("?")[0] == MESSAGES:
            streams = body.get("stream")
            message = messaging.final(messaging.streamed(response)) if streams else messaging.unstreamed(response)
            assert message.stop_reason == ("tool_use" if demands_call(body) else "end_turn")
            assert message.content
        elif path == f"{MESSAGES}/count_tokens":
            assert response.json()["input_tokens"] > 0
        else:
            assert path == "/tokenize" and response.json()["count"] > 0


def check_choices(path: str, body: dict[str, Any], response: httpx.Response) -> None:
    """Checks that every choice has ended, with a call if one was required, and that there is a usage."""
    parts = chunks(response) if body.get("stream") else [response.json()]
    ended = [(choice["index"], choice["finish_reason"]) for part in parts for choice in part["choices"]]
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [0]
    number = len(prompts) * (body.get("n") or 1)
    reasons = {index: reason for index, reason in ended if reason}
    assert sorted(reasons) == list(range(number))
    if demands_call(body) and path == CHAT:
        assert set(reasons.values()) == {"tool_calls"}
    if not body.get("stream") or (body.get("stream_options") or {}).get("include_usage"):
        assert parts[-1]["usage"]["completion_tokens"] > 0


def requests(name: str, path: str) -> Iterator[dict[str, Any]]:
    yield from (request["body"] for request in RECORDED[name] if request["path"] == path)


async def test_litellm_s_second_turn_is_read_without_the_fields_that_are_its_own(replaying: Replaying) -> None:
    """LiteLLM keeps unknown fields in a separate field, and sends it back."""
    body = next(body for body in requests("litellm_thoughts", CHAT) if len(body["messages"]) == 3)
    user, turn, result = body["messages"]
    assert turn["provider_specific_fields"] and turn["reasoning_content"] and turn["tool_calls"]
    plain = {name: turn[name] for name in turn if name != "provider_specific_fields"}
    for back in (turn, plain):
        await replaying.send(CHAT, body | {"messages": [user, back, result]})
    given, expected = replaying.served.engine.requests
    assert given.prompt == expected.prompt


async def test_codex_namespaces_keep_their_names_and_its_built_in_tools_are_omitted(
    replaying: Replaying,
) -> None:
    body = next(requests("codex", RESPONSES))
    (group,) = [tool for tool in body["tools"] if tool["type"] == "namespace"]
    assert {tool["type"] for tool in body["tools"]} == {"function", "namespace", "web_search"}
    inner = group["tools"][0]["name"]
    text = called(f"{group['name']}__{inner}", '{"target": "a"}')
    answer = final(streamed(await replaying.send(RESPONSES, body, text)))
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.namespace, call.name) == (group["name"], inner)
    assert "web_search" not in replaying.served.prompt


async def test_lm_eval_s_five_stop_strings_end_an_answer(replaying: Replaying) -> None:
    body = next(body for body in requests("lm_eval_tasks", COMPLETIONS) if body.get("stop"))
    assert len(body["stop"]) == 5
    *texts, end = body["stop"]
    assert end == "<|im_end|>"  # the end of sequence of the default model; never part of a text
    for stop in texts:
        (choice,) = (await replaying.send(COMPLETIONS, body | {"max_tokens": 50}, f"a{stop}b")).json()["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", stop)


@pytest.mark.parametrize("name", ["instructor_objects", "llm_commands"])
async def test_a_schema_that_leaves_its_objects_open_is_closed(replaying: Replaying, name: str) -> None:
    forms = [body for body in requests(name, CHAT) if schema_of(body)]
    assert any("additionalProperties" not in (schema_of(body) or {}) for body in forms)
    for body in forms:
        closed = (schema_of(body) or {}) | {"additionalProperties": False}
        for schema in (schema_of(body), closed):
            form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
            await replaying.send(CHAT, body | {"response_format": form})
        given, strict = (request.sampling.grammar for request in replaying.served.engine.requests[-2:])
        assert given is not None and given == strict


async def test_trl_announces_tensors_that_come_in_another_request(serve: Serving) -> None:
    served = await serve(rl=True)
    control = served.service.control = NotedControl()
    (body,) = requests("trl_client", UPDATE)
    info = body["update_info"]
    assert info["dtype_names"] == ["float32"]
    tensors = save({name: torch.ones(shape) for name, shape in zip(info["names"], info["shapes"], strict=True)})
    assert (await served.http.post("/start_weight_update", json={})).status_code == 200
    announced = asyncio.create_task(served.http.post(UPDATE, json=body))
    sent = await served.http.post(UPDATE, content=tensors, headers={"content-type": "application/octet-stream"})
    assert sent.status_code == (await announced).status_code == 200
    assert (await served.http.post("/finish_weight_update", json={})).status_code == 200
    assert control.weights.tensors == info["names"]
