"""Haystack: n replies, streams, a forced tool, and a schema."""

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from scene import BOAT_FORMAT, CITIES, KEY, MAX_TOKENS, MODEL, NAMED, QUESTION, SEED, URL, is_boat


def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


def main() -> None:
    def generator(**settings: object) -> OpenAIChatGenerator:
        return OpenAIChatGenerator(
            api_key=Secret.from_token(KEY),
            model=MODEL,
            api_base_url=URL,
            generation_kwargs={"seed": SEED, "max_tokens": MAX_TOKENS, **settings},
        )

    ask = [ChatMessage.from_user(QUESTION)]
    replies = generator(n=3, max_tokens=8).run(ask)["replies"]
    assert len(replies) == 3 and replies[0].meta["usage"]["completion_tokens"] > 3

    pieces: list[str] = []
    streamed = generator(max_tokens=8).run(ask, streaming_callback=lambda chunk: pieces.append(chunk.content))
    assert streamed["replies"][0].text == "".join(pieces) == replies[0].text

    tool = create_tool_from_function(get_weather)
    tool.parameters["properties"]["city"]["enum"] = list(CITIES)
    called = generator(n=2, tool_choice=NAMED).run(ask, tools=[tool])["replies"]
    assert len(called) == 2
    for reply in called:
        (call,) = reply.tool_calls
        assert call.tool_name == "get_weather" and call.arguments["city"] in CITIES
    result = ChatMessage.from_tool("rain", origin=called[0].tool_calls[0])
    assert generator(max_tokens=8).run([*ask, called[0], result], tools=[tool])["replies"]

    formed = generator(n=2, response_format=BOAT_FORMAT).run(ask)["replies"]
    assert len(formed) == 2 and all(is_boat(reply.text) for reply in formed)


main()
