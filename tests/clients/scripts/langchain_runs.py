"""LangChain: n generations, streams, bound tools, and structured output in its three ways."""

from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from scene import CITIES, KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL


class Boat(BaseModel):
    """A boat."""

    kind: Literal["sail", "motor"]
    fast: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


def main() -> None:
    model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, n=3, seed=SEED, max_tokens=MAX_TOKENS, stream_usage=True)
    several = model.generate([[HumanMessage(QUESTION)]], max_tokens=8)
    assert len(several.generations[0]) == 3 and several.llm_output["token_usage"]["completion_tokens"] > 3

    one = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, seed=SEED, max_tokens=MAX_TOKENS, stream_usage=True)
    whole = None
    for chunk in one.stream(QUESTION, max_tokens=8):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.usage_metadata["output_tokens"] > 0
    assert whole.content == one.invoke(QUESTION, max_tokens=8).content

    for method in ("function_calling", "json_schema"):
        boat = one.with_structured_output(Boat, method=method).invoke(QUESTION)
        assert isinstance(boat, Boat)
    assert isinstance(one.with_structured_output(Boat, method="function_calling", strict=True).invoke(QUESTION), Boat)
    assert isinstance(
        one.with_structured_output(dict(Boat.model_json_schema()), method="json_schema").invoke(QUESTION), dict
    )

    bound = one.bind_tools([get_weather], tool_choice="required")
    turn = bound.invoke(QUESTION)
    (call, *_) = turn.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in CITIES
    answers = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in turn.tool_calls]
    second = one.bind_tools([get_weather]).invoke([HumanMessage(QUESTION), turn, *answers], max_tokens=8)
    assert second.usage_metadata["output_tokens"] > 0

    texts = OpenAI(model=MODEL, base_url=URL, api_key=KEY, n=2, best_of=2, seed=SEED, max_tokens=4).generate(["a", "b"])
    assert [len(generations) for generations in texts.generations] == [2, 2]
    responses = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=8, use_responses_api=True)
    assert responses.invoke(QUESTION).usage_metadata["output_tokens"] > 0


main()
