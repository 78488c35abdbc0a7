"""Semantic Kernel: n contents of one chat, streams, a schema, and a function that must be called."""

import asyncio
import json
from typing import Annotated, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from scene import KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL, is_boat
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.contents.function_call_content import FunctionCallContent
from semantic_kernel.functions import kernel_function


class Boat(BaseModel):
    kind: Literal["sail", "motor"]
    fast: bool


class Weather:
    @kernel_function(name="get_weather", description="Returns the weather of a city.")
    def get_weather(self, today: Annotated[bool, "True for today"]) -> str:
        return f"rain: {today}"


async def main() -> None:
    chat = OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=URL, api_key=KEY))
    history = ChatHistory()
    history.add_user_message(QUESTION)

    few = OpenAIChatPromptExecutionSettings(number_of_responses=3, max_tokens=8, seed=SEED)
    contents = await chat.get_chat_message_contents(history, few)
    assert len(contents) == 3
    pieces = ["", "", ""]
    async for several in chat.get_streaming_chat_message_contents(history, few):
        for piece in several:
            pieces[piece.choice_index] += str(piece)
    assert pieces == [str(content) for content in contents]

    formed = OpenAIChatPromptExecutionSettings(
        number_of_responses=2, max_tokens=MAX_TOKENS, seed=SEED, response_format=Boat
    )
    assert all(is_boat(str(content)) for content in await chat.get_chat_message_contents(history, formed))

    kernel = Kernel()
    kernel.add_plugin(Weather(), "weather")
    must = OpenAIChatPromptExecutionSettings(
        max_tokens=MAX_TOKENS,
        seed=SEED,
        parallel_tool_calls=False,
        function_choice_behavior=FunctionChoiceBehavior.Required(auto_invoke=False),
    )
    (content,) = await chat.get_chat_message_contents(history, must, kernel=kernel)
    (call,) = [item for item in content.items if isinstance(item, FunctionCallContent)]
    assert call.function_name == "get_weather"
    assert isinstance(json.loads(call.arguments)["today"], bool)


asyncio.run(main())
