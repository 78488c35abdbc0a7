"""AutoGen: a model client whole and streamed, a schema, and an agent that must use its tool."""

import asyncio
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel
from scene import KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL, is_weather


class Boat(BaseModel):
    kind: Literal["sail", "motor"]
    fast: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=URL,
        api_key=KEY,
        seed=SEED,
        max_tokens=MAX_TOKENS,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        },
    )
    ask = [UserMessage(content=QUESTION, source="user")]
    few = {"max_tokens": 8}
    whole = await client.create(ask, extra_create_args=few)
    pieces = [piece async for piece in client.create_stream(ask, extra_create_args=few)]
    assert pieces[-1].content == whole.content == "".join(pieces[:-1])
    assert whole.usage.completion_tokens > 0

    formed = await client.create(ask, json_output=Boat)
    assert Boat.model_validate_json(formed.content)

    tool = FunctionTool(get_weather, description="Returns the weather of a city.")
    called = await client.create(ask, tools=[tool], tool_choice=tool)
    (call, *_) = called.content
    assert is_weather(call.name, call.arguments)

    agent = AssistantAgent("boats", client, output_content_type=Boat)
    run = await agent.run(task=QUESTION)
    assert isinstance(run.messages[-1].content, Boat)
    await client.close()


asyncio.run(main())
