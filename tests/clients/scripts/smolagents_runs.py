"""smolagents: a chat, a stream, a required tool call, and a schema, through its model for OpenAI's API."""

from scene import BOAT_FORMAT, CITIES, KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL, is_boat
from smolagents import ChatMessage, OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: Its name.
    """
    return f"rain in {city}"


def main() -> None:
    get_weather.inputs["city"]["enum"] = list(CITIES)
    model = OpenAIModel(MODEL, api_base=URL, api_key=KEY, seed=SEED, max_tokens=MAX_TOKENS)
    ask = [ChatMessage(role="user", content=[{"type": "text", "text": QUESTION}])]
    whole = model.generate(ask, max_tokens=8, stop_sequences=["Observation:"], n=2)
    assert len(whole.raw.choices) == 2 and whole.token_usage.output_tokens > 0
    pieces = "".join(delta.content or "" for delta in model.generate_stream(ask, max_tokens=8))
    assert pieces == whole.content

    called = model.generate(ask, tools_to_call_from=[get_weather])
    (call, *_) = called.tool_calls
    assert call.function.name == "get_weather"
    arguments = model.parse_tool_calls(called).tool_calls[0].function.arguments
    assert arguments["city"] in CITIES

    assert is_boat(model.generate(ask, response_format=BOAT_FORMAT).content)


main()
