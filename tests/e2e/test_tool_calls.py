"""Tools with the default model, through real processes: calls are complete, and the same with every kind of server."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import openai
import pytest
from openai import DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from pydantic import BaseModel, Field

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.slow, pytest.mark.real]

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


class GetWeather(BaseModel):
    """The weather of a city, now."""

    city: str = Field(max_length=20)
    """Limited, because a small model does not always end a string."""
    unit: Literal["celsius", "fahrenheit"]


class Add(BaseModel):
    """The sum of two numbers."""

    a: int = Field(ge=-99, le=99)
    b: int = Field(ge=-99, le=99)


TOOLS: Sequence[ChatCompletionToolUnionParam] = (
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    openai.pydantic_function_tool(Add, name="add"),
)
MODELS: dict[str, type[BaseModel]] = {"get_weather": GetWeather, "add": Add}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}
SAMPLED: dict[str, Any] = {"model": DEFAULT_MODEL, "seed": 5, "max_tokens": 200, "tools": TOOLS}


@contextmanager
def client_of(server: ChildServer) -> Iterator[OpenAI]:
    http = DefaultHttpxClient(verify=False)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture(scope="module")
def client(default_server: ChildServer) -> Iterator[OpenAI]:
    with client_of(default_server) as opened:
        yield opened


Calls = list[tuple[str, str]]
"""The calls of one choice: names and arguments."""


def complete(client: OpenAI, n: int, choice: Any = "required", **fields: Any) -> list[Calls]:
    request = {**SAMPLED, "messages": MESSAGES, "n": n, "tool_choice": choice, **fields}
    answer = client.chat.completions.create(**request)
    assert [choice.index for choice in answer.choices] == list(range(n))
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert {choice.message.content for choice in answer.choices} == {None}
    return [
        [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        for choice in answer.choices
    ]


@pytest.fixture(scope="module")
def calls_of_four(client: OpenAI) -> list[Calls]:
    """The calls of four choices, the expected ones of other tests."""
    return complete(client, 4)


def streamed(client: OpenAI, n: int, choice: Any = "required", **fields: Any) -> list[Calls]:
    choices: list[Calls] = [[] for _ in range(n)]
    request = {**SAMPLED, "messages": MESSAGES, "n": n, "tool_choice": choice, **fields}
    for chunk in client.chat.completions.create(**request, stream=True):
        for part in chunk.choices:
            calls = choices[part.index]
            for call in part.delta.tool_calls or []:
                if call.id:
                    calls.append((call.function.name, ""))
                name, so_far = calls[call.index]
                calls[call.index] = (name, so_far + call.function.arguments)
    return choices


def test_every_choice_has_valid_calls_streamed_or_not(client: OpenAI, calls_of_four: list[Calls]) -> None:
    assert streamed(client, 4) == calls_of_four
    for calls in calls_of_four:
        assert calls
        for name, arguments in calls:
            MODELS[name].model_validate_json(arguments)


def test_choice_i_of_n_has_the_calls_of_a_single_request(client: OpenAI, calls_of_four: list[Calls]) -> None:
    for i in (0, 3):
        assert complete(client, 1, seed=SAMPLED["seed"] + i) == [calls_of_four[i]]


def test_parse_makes_models_of_every_choice(client: OpenAI) -> None:
    request = {**SAMPLED, "messages": MESSAGES, "n": 4, "tool_choice": WEATHER}
    answer = client.chat.completions.parse(**request)
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        assert calls
        assert all(isinstance(call.function.parsed_arguments, GetWeather) for call in calls)


def test_with_a_form_and_tools_every_choice_is_one_or_the_other(client: OpenAI) -> None:
    request = {**SAMPLED, "messages": MESSAGES, "n": 4, "tool_choice": "auto", "response_format": GetWeather}
    for choice in client.chat.completions.parse(**request).choices:
        calls = choice.message.tool_calls or []
        assert isinstance(choice.message.parsed, GetWeather) == (choice.finish_reason == "stop") == (not calls)
        assert all(isinstance(call.function.parsed_arguments, GetWeather | Add) for call in calls)


def test_the_result_of_a_call_is_sent_back_and_answered(client: OpenAI) -> None:
    request = {**SAMPLED, "messages": MESSAGES, "tool_choice": WEATHER, "parallel_tool_calls": False}
    message = client.chat.completions.create(**request).choices[0].message
    (call,) = message.tool_calls
    assert "Paris" in json.loads(call.function.arguments)["city"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 17 degrees celsius in Paris, and sunny."}
    again = {**SAMPLED, "messages": [*MESSAGES, message, result], "tool_choice": "none", "n": 4, "max_tokens": 40}
    answer = client.chat.completions.create(**again, temperature=0)
    assert [choice.message.tool_calls for choice in answer.choices] == [None] * 4
    texts = {choice.message.content for choice in answer.choices}
    assert len(texts) == 1
    assert "17" in texts.pop()


@pytest.mark.long
def test_a_cell_makes_the_calls_of_a_single_server(forking: ForkingProcess, calls_of_four: list[Calls]) -> None:
    flags = [DEFAULT_MODEL, "--kv-cache-gb", "0.25", "--prefill", "1", "--decode", "1"]
    with forking.server(flags) as cell, client_of(cell) as separate:
        assert complete(separate, 4) == calls_of_four


def test_a_gateway_makes_the_calls_of_its_server(
    default_server: ChildServer, forking: ForkingProcess, calls_of_four: list[Calls]
) -> None:
    with forking.server(["--worker", default_server.url], command="gateway") as gateway, client_of(gateway) as client:
        assert streamed(client, 4) == calls_of_four
