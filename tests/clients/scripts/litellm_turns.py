"""LiteLLM: n choices whole and streamed, schemas, and a second turn that sends back what LiteLLM made of the first."""

from typing import Any

import litellm
from scene import ASK, BOAT_FORMAT, KEY, MAX_TOKENS, MODEL, NAMED, SEED, URL, WEATHER, is_boat, is_weather

GIVEN: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": KEY, "seed": SEED}


def main() -> None:
    for provider in ("hosted_vllm", "openai"):
        given = GIVEN | {"model": f"{provider}/{MODEL}"}
        whole = litellm.completion(messages=ASK, n=3, max_tokens=8, **given)
        texts = [choice.message.content for choice in whole.choices]
        assert len(texts) == 3 and whole.usage.completion_tokens > 3
        pieces = ["", "", ""]
        for chunk in litellm.completion(messages=ASK, n=3, max_tokens=8, stream=True, **given):
            for choice in chunk.choices:
                pieces[choice.index] += choice.delta.content or ""
        assert pieces == texts

    formed = litellm.completion(messages=ASK, n=2, max_tokens=MAX_TOKENS, response_format=BOAT_FORMAT, **GIVEN)
    assert all(is_boat(choice.message.content) for choice in formed.choices)

    called = litellm.completion(messages=ASK, n=2, max_tokens=MAX_TOKENS, tools=[WEATHER], tool_choice=NAMED, **GIVEN)
    turns = [choice.message for choice in called.choices]
    for turn in turns:
        (call,) = turn.tool_calls
        assert is_weather(call.function.name, call.function.arguments)
    back = turns[0]
    result = {"role": "tool", "tool_call_id": back.tool_calls[0].id, "content": "rain"}
    for sent in (back, back.model_dump()):
        second = litellm.completion(messages=[*ASK, sent, result], tools=[WEATHER], n=2, max_tokens=8, **GIVEN)
        assert len(second.choices) == 2

    text = litellm.text_completion(prompt="A boat", n=2, max_tokens=4, **GIVEN)
    assert len(text.choices) == 2


main()
