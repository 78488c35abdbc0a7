"""A request for a Response is a request for a chat: the same messages, tools and formats under other names."""

import pytest

from motet.api.openai.responses import chat_request, messages
from motet.api.openai.responses_schema import ResponsesRequest

CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def request(given: object, **fields: object) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": given, **fields})


def turns(given: object, **fields: object) -> list[dict[str, object]]:
    body = request(given, **fields)
    return messages(body.instructions, body.input)


def test_instructions_are_the_first_turn_of_the_system() -> None:
    assert turns("hi", instructions="be short") == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hi"},
    ]


def test_message_needs_no_type_and_its_parts_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert turns([{"role": "developer", "content": parts}]) == [{"role": "developer", "content": "a\nb"}]


def test_all_items_of_one_answer_become_one_turn() -> None:
    second = CALL | {"call_id": "call_2"}
    assert turns([THOUGHT, ANSWER, CALL, second, OUTPUT]) == [
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "so",
            "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "call_2"}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]


def test_answers_that_follow_each_other_are_turns_of_their_own() -> None:
    assert [list(turn) for turn in turns([ANSWER, ANSWER, CALL, THOUGHT, CALL])] == [
        ["role", "content"],
        ["role", "content", "tool_calls"],
        ["role", "reasoning_content", "tool_calls"],
    ]


def test_a_summary_replaces_reasoning_that_is_not_shown() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought"}]}
    assert turns([summary]) == [{"role": "assistant", "reasoning_content": "thought"}]


def test_output_of_a_tool_can_be_parts() -> None:
    parts = [{"type": "input_text", "text": "3"}, {"type": "input_text", "text": "apples"}]
    assert turns([OUTPUT | {"output": parts}])[0]["content"] == "3\napples"


def test_tools_and_their_choice_have_one_layer_more_in_a_chat() -> None:
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
    chat = chat_request(
        request("hi", tools=[{"type": "function", **function}], tool_choice={"type": "function", "name": "add"})
    )
    (tool,) = chat.tools
    assert tool.function.model_dump() == function
    rules = chat.tool_rules
    assert rules is not None
    assert [tool.name for tool in rules.callable] == ["add"]
    assert rules.mode == "required"


def test_some_tools_can_be_allowed() -> None:
    tools = [{"type": "function", "name": name} for name in ("add", "sub", "mul")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools[:2]}
    rules = chat_request(request("hi", tools=tools, tool_choice=choice, parallel_tool_calls=False)).tool_rules
    assert rules is not None
    assert [tool.name for tool in rules.callable] == ["add", "sub"]
    assert (rules.mode, rules.parallel) == ("auto", False)


def test_fields_that_chats_have_too_are_passed_on() -> None:
    chat = chat_request(
        request(
            "hi",
            temperature=0.5,
            top_p=0.9,
            top_k=4,
            seed=7,
            stop="END",
            max_output_tokens=9,
            chat_template_kwargs={"x": 1},
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            include_reasoning=False,
            stream=True,
            stream_options={"include_obfuscation": False},
            cache_salt="s",
            priority=3,
            reasoning={"effort": "low", "summary": "auto"},
        )
    )
    assert (chat.temperature, chat.top_p, chat.top_k, chat.seed, chat.stop) == (0.5, 0.9, 4, 7, ["END"])
    assert (chat.requested_max_tokens, chat.num_logprobs, chat.n) == (9, 2, 1)
    assert (chat.chat_template_kwargs, chat.include_reasoning, chat.reasoning_effort) == ({"x": 1}, False, "low")
    assert (chat.stream, chat.cache_salt, chat.priority) == (True, "s", 3)


@pytest.mark.parametrize("field", ["id", "status", "phase"])
def test_unknown_fields_of_a_message_are_ignored(field: str) -> None:
    assert turns([{"role": "user", "content": "hi", field: "x"}]) == [{"role": "user", "content": "hi"}]
