"""Responses of the default model, served by a real process, through the official client."""

from collections.abc import Iterator
from typing import Annotated, Literal

import pytest
from openai import DefaultHttpxClient, OpenAI
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel, Field

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.real]

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def client(default_server: ChildServer) -> Iterator[OpenAI]:
    http = DefaultHttpxClient(verify=False)
    with OpenAI(base_url=f"{default_server.url}/v1", api_key="none", max_retries=0, http_client=http) as opened:
        yield opened


def test_a_response_streamed_or_not_equals_the_chat_of_the_same_seed(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, seed=3
    )
    seeded = {"seed": 3}
    response = client.responses.create(model=DEFAULT_MODEL, input=QUESTION, max_output_tokens=24, extra_body=seeded)
    assert response.output_text == chat.choices[0].message.content
    streamed = ""
    with client.responses.create(
        model=DEFAULT_MODEL, input=QUESTION, max_output_tokens=24, extra_body=seeded, stream=True
    ) as events:
        for event in events:
            streamed += event.delta if event.type == "response.output_text.delta" else ""
    assert streamed == response.output_text
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.total_tokens == chat.usage.total_tokens


def test_a_conversation_continues_after_the_last_answer(client: OpenAI) -> None:
    first = client.responses.create(model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=12)
    assert "Paris" in first.output_text
    items = [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in first.output)]
    items.append({"role": "user", "content": "Which country is it in?"})
    second = client.responses.create(
        model=DEFAULT_MODEL,
        input=items,  # type: ignore[arg-type]  # items of an output are items of an input
        temperature=0,
        max_output_tokens=12,
    )
    assert "France" in second.output_text


WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_required_call_follows_its_schema(client: OpenAI, temperature: float) -> None:
    with client.responses.stream(
        model=DEFAULT_MODEL,
        input="How is the weather in Paris?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
        max_output_tokens=100,
    ) as events:
        response = events.get_final_response()
    (call,) = response.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert call.parsed_arguments in ({"city": "Paris"}, {"city": "Rome"})


class Boat(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    masts: Literal[1, 2, 3]


def test_an_answer_in_a_format_is_parsed_by_the_client(client: OpenAI) -> None:
    response = client.responses.parse(
        model=DEFAULT_MODEL,
        input="Give a name for a boat.",
        text_format=Boat,
        temperature=0.7,
        max_output_tokens=200,
        extra_body={"seed": 1},
    )
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Boat)
