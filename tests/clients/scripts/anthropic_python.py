"""Anthropic's official client: messages whole and streamed, a tool with a second turn, an object, tokens counted."""

import json
from typing import Any, Literal

from anthropic import Anthropic
from pydantic import BaseModel
from scene import ASK, KEY, MAX_TOKENS, MODEL, SEED, URL, WEATHER, is_weather

SEEDED: dict[str, Any] = {"extra_body": {"seed": SEED}}
FUNCTION = WEATHER["function"]
TOOL: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


class Boat(BaseModel):
    kind: Literal["sail", "motor"]
    fast: bool


def main() -> None:
    client = Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY)
    whole = client.messages.create(model=MODEL, messages=ASK, max_tokens=8, system="Be brief.", **SEEDED)
    (block,) = whole.content
    assert block.type == "text" and whole.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

    with client.messages.stream(model=MODEL, messages=ASK, max_tokens=8, system="Be brief.", **SEEDED) as stream:
        assert "".join(stream.text_stream) == block.text
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)

    choice: Any = {"type": "tool", "name": TOOL["name"]}
    called = client.messages.create(
        model=MODEL, messages=ASK, max_tokens=MAX_TOKENS, tools=[TOOL], tool_choice=choice, **SEEDED
    )
    (use,) = called.content
    assert use.type == "tool_use" and called.stop_reason == "tool_use"
    assert is_weather(use.name, json.dumps(use.input))
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}]}
    turns: Any = [*ASK, called.to_param(), result]
    with client.messages.stream(model=MODEL, messages=turns, max_tokens=8, tools=[TOOL], **SEEDED) as stream:
        assert stream.get_final_message().content

    parsed = client.messages.parse(model=MODEL, messages=ASK, max_tokens=MAX_TOKENS, output_format=Boat, **SEEDED)
    assert isinstance(parsed.parsed_output, Boat)


main()
