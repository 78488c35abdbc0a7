"""A forced call that is cut off before its arguments start is shown on no route, neither streamed nor unstreamed."""

from typing import Any

import pytest

from tests.api import messaging, responding
from tests.api.calling import PARIS, TIME, WEATHER, CallingServing, joined, unstreamed
from tests.api.openai.test_responses_tools import FLAT_WEATHER
from tests.api.serving import Served, chunks, saying
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

LENGTH = len(fake_answer(PARIS[: PARIS.index("arguments")], eos=False))
CUTS = pytest.mark.parametrize("cut", [1, 2, LENGTH // 2, LENGTH])
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}
FORCED: dict[str, dict[str, Any]] = {
    "required": {"tools": [WEATHER], "tool_choice": "required"},
    "named": {"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "required with a format": {"tools": [WEATHER], "tool_choice": "required", "response_format": FORM},
    "call or format": {"tools": [WEATHER], "response_format": FORM},
}


async def chat(served: Served, **fields: Any) -> dict[str, Any]:
    """Returns the only choice, and checks that the stream is the same."""
    (choice,) = unstreamed((await served.chat(**fields)).json()).values()
    (streamed,) = joined(chunks(await served.chat(**fields, stream=True))).values()
    assert streamed == choice
    return choice


@CUTS
@pytest.mark.parametrize("fields", FORCED.values(), ids=FORCED)
async def test_a_chat_has_no_content(serve_tools: CallingServing, fields: dict[str, Any], cut: int) -> None:
    choice = await chat(await serve_tools(saying(PARIS)), **fields, max_tokens=cut)
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    if "tool_choice" in fields:
        assert choice["message"]["content"] is None


@CUTS
async def test_a_complete_call_is_all_that_a_chat_shows(serve_tools: CallingServing, cut: int) -> None:
    served = await serve_tools(saying(f"{PARIS}\n{PARIS}"))
    before = len(fake_answer(f"{PARIS}\n", eos=False))
    choice = await chat(served, tools=[WEATHER], tool_choice="required", max_tokens=before + cut)
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1


async def test_a_stop_string_cuts_a_call_without_content(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(PARIS))
    for stop in ("name", "get_"):
        choice = await chat(served, tools=[WEATHER], tool_choice="required", stop=stop)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)


async def test_a_strict_call_is_forced_after_its_tag(serve_tools: CallingServing) -> None:
    text = f"Let me see. {PARIS}"
    served = await serve_tools(saying(text))
    cut = len(fake_answer(text[: text.index("get_")], eos=False))
    shown = {}
    for name, tool in (("strict", STRICT), ("free", WEATHER)):
        choice = await chat(served, tools=[tool], max_tokens=cut)
        shown[name] = choice["message"]["content"].strip()
    assert shown == {"strict": "Let me see.", "free": text[: text.index("get_")].strip()}


@CUTS
async def test_a_response_has_no_message(serve_tools: CallingServing, cut: int) -> None:
    served = await serve_tools(saying(PARIS))
    fields: dict[str, Any] = {"tools": [FLAT_WEATHER], "tool_choice": "required", "max_output_tokens": cut}
    response = responding.unstreamed(await responding.post(served, **fields))
    assert response.status == "incomplete"
    assert response.output == []
    streamed = responding.streamed(await responding.post(served, stream=True, **fields))
    assert responding.plain(responding.final(streamed)) == responding.plain(response)
    assert [event.type for event in streamed if "delta" in event.type] == []


@CUTS
async def test_a_message_has_no_text(serve_tools: CallingServing, cut: int) -> None:
    served = await serve_tools(saying(PARIS))
    tools = [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any"}, "max_tokens": cut}
    message = messaging.unstreamed(await messaging.post(served, **fields))
    assert (message.stop_reason, message.content) == ("max_tokens", [])
    streamed = messaging.streamed(await messaging.post(served, stream=True, **fields))
    assert messaging.plain(messaging.final(streamed)) == messaging.plain(message)
