"""The official client: n choices whole and streamed, tools, parsed objects, completions, Responses and Decisions."""

from collections import defaultdict
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel
from scene import ASK, KEY, MAX_TOKENS, MODEL, NAMED, QUESTION, SEED, URL, WEATHER, is_weather


class Boat(BaseModel):
    kind: Literal["sail", "motor"]
    fast: bool


def main() -> None:
    client = OpenAI(base_url=URL, api_key=KEY)
    whole = client.chat.completions.create(model=MODEL, messages=ASK, n=4, seed=SEED, max_tokens=8)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None and whole.usage.completion_tokens > 4

    pieces: dict[int, str] = defaultdict(str)
    usage = None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=ASK, n=4, seed=SEED, max_tokens=8, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert [pieces[index] for index in range(4)] == texts
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens

    called = client.chat.completions.create(
        model=MODEL, messages=ASK, n=3, seed=SEED, max_tokens=MAX_TOKENS, tools=[WEATHER], tool_choice=NAMED
    )
    for choice in called.choices:
        (call,) = choice.message.tool_calls or []
        assert is_weather(call.function.name, call.function.arguments)

    parsed = client.chat.completions.parse(
        model=MODEL, messages=ASK, n=3, seed=SEED, max_tokens=MAX_TOKENS, response_format=Boat
    )
    assert all(isinstance(choice.message.parsed, Boat) for choice in parsed.choices) and len(parsed.choices) == 3

    several = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=SEED, max_tokens=4, logprobs=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]

    response = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Boat, max_output_tokens=MAX_TOKENS, extra_body={"seed": SEED}
    )
    assert isinstance(response.output_parsed, Boat)

    decision = client.decisions.create(
        model=MODEL,
        input=QUESTION,
        questions=[
            {"type": "predicate", "instructions": "Is this a question?"},
            {"type": "choice", "instructions": "Which boat?", "choices": [{"value": "sail"}, {"value": "motor boat"}]},
        ],
    )
    predicate, chosen = decision.answers
    assert predicate.type == "predicate" and 0 < predicate.probability < 1
    assert chosen.type == "choice" and chosen.choice in ("sail", "motor boat")
    assert abs(sum(one.probability for one in chosen.probabilities) - 1) < 1e-9


main()
