"""A request for a message is a request for a chat: the same turns, tools and forms under other names."""

from typing import Any

import pytest

from motet.api.anthropic.messages import chat_request, turns
from motet.api.anthropic.messages_schema import MessagePrompt, MessagesRequest
from motet.api.openai.chat_schema import ChatRequest

TEXT = {"type": "text", "text": "so"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "sig"}
USE = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "3"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {}}}}


def user(*content: object) -> dict[str, object]:
    return {"role": "user", "content": list(content)}


def own(*content: object) -> dict[str, object]:
    return {"role": "assistant", "content": list(content)}


def request(*turns: object, **fields: object) -> MessagesRequest:
    body = {"messages": list(turns) or [user(TEXT)], "max_tokens": 2000, **fields}
    return MessagesRequest.model_validate(body)


def chat(*turns: object, **fields: object) -> ChatRequest:
    return chat_request(request(*turns, **fields))


def chat_messages(*given: object, **fields: object) -> list[dict[str, object]]:
    body = request(*given, **fields)
    return turns(body.system, body.messages)


def test_system_comes_first_and_can_be_blocks() -> None:
    expected = [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi"}]
    user_turn = {"role": "user", "content": "hi"}
    assert chat_messages(user_turn, system="a\nb") == expected
    assert chat_messages(user_turn, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == expected


def test_a_turn_of_the_system_can_be_between_others() -> None:
    assert chat_messages(user(TEXT), {"role": "system", "content": "now"}) == [
        {"role": "user", "content": "so"},
        {"role": "system", "content": "now"},
    ]


def test_all_blocks_of_one_answer_become_one_turn() -> None:
    second = USE | {"id": "call_2"}
    assert chat_messages(user(TEXT), own(THOUGHT, TEXT, USE, second), user(RESULT)) == [
        {"role": "user", "content": "so"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "so",
            "tool_calls": [CALL, CALL | {"id": "call_2"}],
        },
        CHAT_RESULT,
    ]


def test_turns_of_one_side_in_a_row_are_one_turn() -> None:
    assert chat_messages(user(TEXT), user(TEXT), own(TEXT), own(TEXT, THOUGHT), user(TEXT)) == [
        {"role": "user", "content": "so\nso"},
        {"role": "assistant", "content": "so\nso", "reasoning_content": "hm"},
        {"role": "user", "content": "so"},
    ]


def test_results_are_turns_of_their_own_and_text_follows_them() -> None:
    second = {"type": "tool_result", "tool_use_id": "call_2", "content": [TEXT, TEXT], "is_error": True}
    third = {"type": "tool_result", "tool_use_id": "call_3"}
    assert chat_messages(user(RESULT, second, third, TEXT)) == [
        CHAT_RESULT,
        {"role": "tool", "tool_call_id": "call_2", "content": "so\nso"},
        {"role": "tool", "tool_call_id": "call_3", "content": ""},
        {"role": "user", "content": "so"},
    ]


def test_thoughts_that_only_anthropic_can_read_are_left_out() -> None:
    hidden = {"type": "redacted_thinking", "data": "x"}
    assert chat_messages(user(TEXT), own(hidden, TEXT), user(TEXT), own(hidden))[1::2] == [
        {"role": "assistant", "content": "so"},
        {"role": "assistant"},
    ]


def test_an_answer_of_nothing_is_a_turn() -> None:
    assert chat_messages(user(TEXT), own(), user(TEXT))[1] == {"role": "assistant"}


def test_tools_have_the_names_of_a_chat() -> None:
    body = chat(
        tools=[ADD | {"cache_control": {"type": "ephemeral"}}, {"name": "x", "input_schema": {}, "strict": True}]
    )
    first, second = body.tools
    assert first.function.model_dump() == {
        "name": "add",
        "description": "adds",
        "parameters": ADD["input_schema"],
        "strict": False,
    }
    assert second.function.strict


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "add"}, "required", False),
        ({"type": "none"}, None, True),
    ],
)
def test_the_choice_of_tools_is_that_of_a_chat(choice: object, mode: str | None, parallel: bool) -> None:
    rules = chat(tools=[ADD, ADD | {"name": "sub"}], tool_choice=choice).tool_rules
    assert (None if rules is None else rules.mode) == mode
    if rules is not None:
        assert rules.parallel == parallel
        named = isinstance(choice, dict) and choice["type"] == "tool"
        assert [tool.name for tool in rules.callable] == (["add"] if named else ["add", "sub"])


@pytest.mark.parametrize(
    ("fields", "effort", "shown", "kwargs"),
    [
        ({}, None, True, {}),
        ({"thinking": {"type": "adaptive"}}, None, True, {}),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, None, True, {}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, False, {}),
        ({"thinking": {"type": "disabled"}}, "none", False, {}),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", False, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None, True, {"enable_thinking": True}),
        ({"output_config": {"effort": "low"}}, "low", True, {}),
        ({"output_config": {"effort": "max"}}, "max", True, {}),
        ({"chat_template_kwargs": {"a": 1}}, None, True, {"a": 1}),
    ],
)
def test_thinking_becomes_the_fields_of_a_chat(
    fields: dict[str, Any], effort: str | None, shown: bool, kwargs: dict[str, object]
) -> None:
    body = chat(**fields)
    assert (body.reasoning_effort, body.include_reasoning, body.chat_template_kwargs) == (effort, shown, kwargs)


def test_a_turn_of_the_assistant_at_the_end_is_to_be_continued() -> None:
    body = chat(user(TEXT), own(TEXT))
    assert (body.continue_final_message, body.add_generation_prompt) == (True, False)
    assert not chat(user(TEXT)).continue_final_message


def test_fields_of_sampling_have_the_same_names_but_for_the_stop_strings() -> None:
    body = chat(temperature=0.5, top_p=0.5, top_k=5, stop_sequences=["a"], seed=3, cache_salt="s", keep_s=2.0)
    assert (body.temperature, body.top_p, body.top_k, body.stop) == (0.5, 0.5, 5, ["a"])
    assert (body.seed, body.cache_salt, body.keep_s, body.requested_max_tokens, body.n) == (3, "s", 2.0, 2000, 1)


def test_counting_tokens_needs_no_max_tokens() -> None:
    fields = {"messages": [user(TEXT)], "tools": [ADD], "thinking": {"type": "disabled"}, "model": "tiny"}
    body = chat_request(MessagePrompt.model_validate(fields))
    assert (body.max_tokens, body.model, body.reasoning_effort, len(body.tools)) == (None, "tiny", "none", 1)
