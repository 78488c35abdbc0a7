"""OpenAI's Agents SDK: a tool that must be called, and an output type, over chat and over Responses."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from scene import KEY, MAX_TOKENS, MODEL, QUESTION, URL


class Boat(BaseModel):
    kind: Literal["sail", "motor"]
    fast: bool


ASKED: list[str] = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    ASKED.append(city)
    return "rain"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=URL, api_key=KEY)
    settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        boats = Agent(name="Boats", model=model, model_settings=settings, output_type=Boat)
        run = await Runner.run(boats, QUESTION)
        assert isinstance(run.final_output, Boat)
        streamed = Runner.run_streamed(boats, QUESTION)
        events = [event async for event in streamed.stream_events()]
        assert events and isinstance(streamed.final_output, Boat)

        ASKED.clear()
        must = ModelSettings(temperature=0, max_tokens=MAX_TOKENS, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(name="Weather", model=model, model_settings=must, tools=[get_weather])
        run = await Runner.run(agent, QUESTION, max_turns=3)
        assert ASKED and set(ASKED) <= {"Paris", "Rome"}
        assert run.context_wrapper.usage.output_tokens > 0


asyncio.run(main())
