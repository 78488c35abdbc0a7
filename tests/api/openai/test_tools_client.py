"""The helpers of the official client that read tool calls: `parse`, `stream` and pydantic models."""

from collections import defaultdict
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ParsedFunctionToolCall
from pydantic import BaseModel

from tests.api.calling import CallingServing, called
from tests.api.serving import MODEL, saying
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Weather in Paris and Rome?"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


TOOLS = [openai.pydantic_function_tool(GetWeather, name="get_weather")]


def weather(city: str) -> str:
    return called("get_weather", f'{{"city": "{city}"}}')


@pytest.mark.parametrize("n", [1, 4])
async def test_parse_makes_models_of_the_calls_of_every_choice(serve_tools: CallingServing, n: int) -> None:
    served = await serve_tools(saying(*(weather(f"Town {i}") + weather("Rome") for i in range(n))))
    answer = await served.openai.chat.completions.parse(model=MODEL, messages=ASK, tools=TOOLS, n=n)
    for index, choice in enumerate(answer.choices):
        assert [call.function.parsed_arguments for call in choice.message.tool_calls or []] == [
            GetWeather(city=f"Town {index}"),
            GetWeather(city="Rome"),
        ]
    assert served.engine.requests[0].sampling.grammar is not None  # the client makes its tools strict


async def test_an_answer_can_be_sent_back_as_the_client_has_it(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(weather("Paris")))
    answer = await served.openai.chat.completions.parse(model=MODEL, messages=ASK, tools=TOOLS)
    message = answer.choices[0].message
    (call,) = message.tool_calls or []
    result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    both: list[Any] = [message, message.model_dump()]
    for back in both:
        await served.openai.chat.completions.create(model=MODEL, messages=[*ASK, back, result], tools=TOOLS)
    _, given, plain = (request.prompt for request in served.engine.requests)
    assert given == plain
    assert "Paris" in served.tokenizer.decode(given[-200:])


async def test_the_stream_helper_reports_calls_and_content_of_every_choice(serve_tools: CallingServing) -> None:
    answers = [weather("Paris"), "No idea.", f"<think>Two.</think>Both. {weather('Paris')}{weather('Rome')}"]
    served = await serve_tools(saying(*answers))
    pieces: dict[str, str] = defaultdict(str)
    done: list[Any] = []
    async with served.openai.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS, n=3) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces[event.name] += event.arguments_delta
            elif event.type == "tool_calls.function.arguments.done":
                done.append(event.parsed_arguments)
            elif event.type == "content.done":
                pieces["content"] += event.content
        final = await stream.get_final_completion()
    assert sorted(call.city for call in done) == ["Paris", "Paris", "Rome"]
    assert pieces["get_weather"].count("Paris") == 2
    assert pieces["content"] == "No idea.Both."
    choices = [(choice.finish_reason, choice.message.content, calls(choice.message)) for choice in final.choices]
    assert choices == [
        ("tool_calls", None, [GetWeather(city="Paris")]),
        ("stop", "No idea.", []),
        ("tool_calls", "Both.", [GetWeather(city="Paris"), GetWeather(city="Rome")]),
    ]
    assert final.choices[2].message.model_extra is not None
    assert final.choices[2].message.model_extra["reasoning_content"] == "Two."


async def test_the_client_knows_a_call_that_was_cut_off(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(weather("Paris")))
    cut = len(fake_answer(weather("Pa")[:-16], eos=False))
    with pytest.raises(openai.LengthFinishReasonError):
        await served.openai.chat.completions.parse(model=MODEL, messages=ASK, tools=TOOLS, max_tokens=cut)


def calls(message: Any) -> list[object]:
    tool_calls = message.tool_calls or []
    assert all(isinstance(call, ParsedFunctionToolCall) for call in tool_calls)
    return [call.function.parsed_arguments for call in tool_calls]
