"""LlamaIndex's OpenAILike: chats, streams, a required tool, and an object; it reads one choice only."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from scene import CITIES, KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL


class Boat(BaseModel):
    """A boat."""

    kind: Literal["sail", "motor"]
    fast: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


def main() -> None:
    given = {"model": MODEL, "api_base": URL, "api_key": KEY, "max_tokens": MAX_TOKENS}
    more = {"additional_kwargs": {"seed": SEED}, "context_window": 8192}
    model = OpenAILike(is_chat_model=True, is_function_calling_model=True, **given, **more)
    ask = [ChatMessage(role="user", content=QUESTION)]
    whole = model.chat(ask, max_tokens=8, n=2)
    assert len(whole.raw.choices) == 2
    (*_, last) = model.stream_chat(ask, max_tokens=8)
    assert last.message.content == whole.message.content

    tool = FunctionTool.from_defaults(get_weather)
    turn = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call, *_) = model.get_tool_calls_from_response(turn)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in CITIES

    calling = model.as_structured_llm(Boat).chat(ask)
    assert isinstance(calling.raw, Boat)
    forming = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, **given, **more)
    assert isinstance(forming.as_structured_llm(Boat).chat(ask).raw, Boat)
    plain = OpenAILike(is_chat_model=False, **given, **more)
    assert plain.complete("A boat", max_tokens=4).raw.usage.completion_tokens > 0


main()
