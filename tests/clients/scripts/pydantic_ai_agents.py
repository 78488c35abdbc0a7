"""Pydantic AI: objects by a tool call and by a schema, a tool that is run, and streams."""

from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from scene import KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL


class Boat(BaseModel):
    """A boat."""

    kind: Literal["sail", "motor"]
    fast: bool


def main() -> None:
    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    model = OpenAIChatModel(MODEL, provider=provider)
    settings = ModelSettings(max_tokens=MAX_TOKENS, seed=SEED)

    for output in (NativeOutput(Boat), ToolOutput(Boat)):
        run = Agent(model, output_type=output, model_settings=settings).run_sync(QUESTION)
        assert isinstance(run.output, Boat)
        assert run.usage.output_tokens > 0

    cities: list[str] = []
    agent = Agent(model, output_type=ToolOutput(Boat), model_settings=settings)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Returns the weather of a city."""
        cities.append(city)
        return "rain"

    assert isinstance(agent.run_sync(QUESTION).output, Boat)
    assert set(cities) <= {"Paris", "Rome"}

    with Agent(model, model_settings=ModelSettings(max_tokens=8, seed=SEED)).run_stream_sync(QUESTION) as stream:
        pieces = list(stream.stream_text(delta=True))
    assert pieces
    responses = Agent(OpenAIResponsesModel(MODEL, provider=provider), output_type=NativeOutput(Boat))
    assert isinstance(
        responses.run_sync(QUESTION, model_settings=ModelSettings(temperature=0, max_tokens=MAX_TOKENS)).output, Boat
    )


main()
