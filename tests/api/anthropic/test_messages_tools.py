"""Reasoning and tool calls in `/v1/messages`: the same parts as in a chat, sent as blocks."""

from typing import Any

import pytest
from anthropic.types import Message, MessageParam, ToolParam, ToolUseBlock

from motet.api.anthropic.message_output import call_id_of
from tests.api.calling import PARIS, WEATHER, CallingServing, called
from tests.api.messaging import MAX_TOKENS, final, plain, post, streamed, texts, unstreamed
from tests.api.one_answer import ANSWERS, TIME, weather_script
from tests.api.serving import MODEL, Served, saying
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

FUNCTION: Any = WEATHER["function"]
MESSAGE_WEATHER: ToolParam = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
MESSAGE_TIME: ToolParam = {"name": "get_time", "input_schema": {"type": "object"}}
TOOLS = [MESSAGE_WEATHER, MESSAGE_TIME]


def uses(message: Message) -> list[ToolUseBlock]:
    return [block for block in message.content if block.type == "tool_use"]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_streamed_message_is_the_unstreamed_message(serve_tools: CallingServing, answer: str) -> None:
    served = await serve_tools(saying(answer))
    message = unstreamed(await post(served, tools=TOOLS))
    assert plain(final(streamed(await post(served, tools=TOOLS, stream=True)))) == plain(message)


async def test_blocks_hold_the_thoughts_the_text_and_the_calls(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(ANSWERS["thought, text and two calls"]))
    message = unstreamed(await post(served, tools=TOOLS))
    thought, *_ = message.content
    assert thought.type == "thinking"
    assert thought.thinking == "Where?"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(use.name, use.input) for use in uses(message)] == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    assert len({use.id for use in uses(message)}) == 2
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details is not None
    thinking = len(fake_answer("<think>Where?</think>", eos=False))
    assert message.usage.output_tokens_details.thinking_tokens == thinking


@pytest.mark.parametrize("cut", range(1, 60, 7))
async def test_a_truncated_call_has_the_arguments_so_far(serve_tools: CallingServing, cut: int) -> None:
    served = await serve_tools(saying(called("get_weather", '{"city": "Paris", "days": [1, 2, 3]}')))
    message = unstreamed(await post(served, tools=TOOLS, max_tokens=cut))
    assert message.stop_reason == "max_tokens"
    assert plain(final(streamed(await post(served, tools=TOOLS, max_tokens=cut, stream=True)))) == plain(message)


@pytest.mark.parametrize("stream", [False, True])
async def test_loop_of_a_tool_leads_to_an_answer(serve_tools: CallingServing, stream: bool) -> None:
    served = await serve_tools(weather_script(serve_tools))
    turns: list[MessageParam] = [{"role": "user", "content": "Weather in Paris?"}]
    first = await answer(served, turns, stream=stream)
    (use,) = uses(first)
    assert (use.input, first.stop_reason) == ({"city": "Paris"}, "tool_use")
    result: MessageParam = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}],
    }
    assert texts(await answer(served, [*turns, first.to_param(), result], stream=stream)) == "It is rain."


async def answer(served: Served, turns: list[MessageParam], *, stream: bool) -> Message:
    client = served.anthropic.messages
    if not stream:
        return await client.create(model=MODEL, max_tokens=MAX_TOKENS, messages=turns, tools=TOOLS)
    async with client.stream(model=MODEL, max_tokens=MAX_TOKENS, messages=turns, tools=TOOLS) as events:
        return await events.get_final_message()


async def test_prompt_of_a_loop_is_that_of_the_same_chat(serve_tools: CallingServing) -> None:
    served = await serve_tools(weather_script(serve_tools))
    user = {"role": "user", "content": "Weather in Paris?"}
    first = unstreamed(await post(served, [user], tools=[MESSAGE_WEATHER]))
    (use,) = uses(first)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    back = [user, {"role": "assistant", "content": plain_blocks(first)}, {"role": "user", "content": [result]}]
    unstreamed(await post(served, back, tools=[MESSAGE_WEATHER]))
    function = {"name": use.name, "arguments": '{"city": "Paris"}'}
    calls = [{"id": call_id_of(use.id), "type": "function", "function": function}]
    turn = {"role": "assistant", "reasoning_content": "Where?", "tool_calls": calls}
    turns = [user, turn, {"role": "tool", "tool_call_id": call_id_of(use.id), "content": "rain"}]
    assert (await served.chat(messages=turns, tools=[WEATHER])).status_code == 200
    _, of_message, of_chat = served.engine.requests
    assert of_message.prompt == of_chat.prompt


def plain_blocks(message: Message) -> list[dict[str, Any]]:
    return [block.to_dict() for block in message.content]


@pytest.mark.parametrize(
    ("choice", "of_chat", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any"}, "required", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "get_weather"}, {"type": "function", "function": {"name": "get_weather"}}, True),
        ({"type": "none"}, "none", True),
    ],
)
async def test_a_choice_of_tools_gives_the_engine_the_same_grammar_as_in_a_chat(
    serve_tools: CallingServing, choice: object, of_chat: object, parallel: bool
) -> None:
    served = await serve_tools(saying(PARIS))
    unstreamed(await post(served, tools=TOOLS, tool_choice=choice))
    time = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    fields = {"tools": [WEATHER, time], "tool_choice": of_chat, "parallel_tool_calls": parallel}
    assert (await served.chat(max_tokens=MAX_TOKENS, **fields)).status_code == 200
    first, second = served.engine.requests
    assert first.sampling == second.sampling
    assert first.prompt == second.prompt


async def test_only_one_call_can_be_requested(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(f"{PARIS}\n{TIME}"))
    one = unstreamed(await post(served, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
    assert [use.name for use in uses(one)] == ["get_weather"]
    none = unstreamed(await post(served, tools=TOOLS, tool_choice={"type": "none"}))
    assert uses(none) == []
    assert none.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("thinking", "blocks"),
    [
        (None, ["thinking", "text"]),
        ({"type": "adaptive"}, ["thinking", "text"]),
        ({"type": "enabled", "budget_tokens": 1024}, ["thinking", "text"]),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, ["text"]),
        ({"type": "disabled"}, ["text"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_a_block_unless_it_is_omitted(
    serve_tools: CallingServing, thinking: object, blocks: list[str], stream: bool
) -> None:
    served = await serve_tools(saying("<think>hm</think>So."))
    response = await post(served, thinking=thinking, max_tokens=2000, stream=stream)
    message = final(streamed(response)) if stream else unstreamed(response)
    assert [block.type for block in message.content] == blocks
    assert texts(message) == "So."


async def test_effort_reaches_the_template(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying("hm</think>So."))
    message = unstreamed(await post(served, output_config={"effort": "high"}))
    assert served.prompt.endswith("<think>")
    assert [block.type for block in message.content] == ["thinking", "text"]


async def test_thoughts_that_are_cut_leave_no_text(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying("<think>and so on, and so on"))
    message = unstreamed(await post(served, max_tokens=12))
    assert ([block.type for block in message.content], message.stop_reason) == (["thinking"], "max_tokens")
