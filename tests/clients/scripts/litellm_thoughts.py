"""LiteLLM with a model that thinks: it keeps thoughts in fields of its own and sends them back in a second turn."""

import litellm
from scene import ASK, KEY, MODEL, NAMED, URL, WEATHER, is_weather


def main() -> None:
    given = {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": KEY, "tools": [WEATHER]}
    first = litellm.completion(messages=ASK, n=2, tool_choice=NAMED, **given)
    assert len(first.choices) == 2
    back = first.choices[1].message
    assert back.reasoning_content == "Hm."
    (call,) = back.tool_calls
    assert is_weather(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    for sent in (back, back.model_dump()):
        second = litellm.completion(messages=[*ASK, sent, result], n=2, **given)
        assert [choice.message.reasoning_content for choice in second.choices] == ["Hm.", "Hm."]


main()
