"""Jinja templates render chat messages, and clients get an error when that does not work."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from motet.errors import ModelLoadError, RequestError
from motet.text.template import ChatTemplate, Message, plain_messages, with_tools_as_text
from motet.text.tokenizer import Tokenizer
from motet.text.tools.cursor import Cursor
from motet.text.tools.json_formats import HERMES, HERMES_BEGIN, HERMES_END
from motet.text.tools.tool_format import Tool
from tests.tiny_tokenizer import CHAT_TEMPLATE, build_tiny_tokenizer

USER = {"role": "user", "content": "hi"}


def calling(arguments: object) -> Message:
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


CALLED, THINKING = calling('{"city": "Rome"}'), {"role": "assistant", "content": "4", "reasoning_content": "2"}
DEVELOPER = {"role": "developer", "content": "be brief"}
TOOLS_AND_MORE = "{{ tools | length if tools else 'none' }} {{ more }}"
AS_TEXT = "[system:# Too][user:How i][assistant:Let m][user:<tool][user:Thank]"
CONTENTS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
TURNS: list[Message] = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    {"role": "user", "content": "Thanks!"},
]


def render(source: str, *messages: Mapping[str, object]) -> str:
    return ChatTemplate(source).render(messages or [USER]).text


def test_the_models_template_is_rendered() -> None:
    tokenizer = Tokenizer(build_tiny_tokenizer(), chat_template=CHAT_TEMPLATE)
    assert ChatTemplate.of(tokenizer).render([USER]).text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_generation_prompt_can_be_omitted() -> None:
    text = ChatTemplate(CHAT_TEMPLATE).render([USER], add_generation_prompt=False).text
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_error_of_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(RequestError, match=r"no chat template.*--chat-template") as raised:
        ChatTemplate(None).render([USER])
    assert raised.value.param == "chat_template"


def test_a_broken_template_stops_the_server() -> None:
    with pytest.raises(ModelLoadError, match="not valid Jinja: line 2"):
        ChatTemplate("\n{% if %}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        pytest.param("{{ 'x'.encode('no such') }}", "unknown encoding", marks=pytest.mark.slow),  # in a process
    ],
)
def test_an_error_in_a_template_is_a_request_error(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        render(source)
    assert raised.value.param == "messages"


RENDERED: dict[str, tuple[str, dict[str, object], str]] = {
    "the model's special tokens": ("{{ bos_token }}{{ pad_token is defined }}", {}, "<s>False"),
    "tojson": (
        "{{ messages[0] | tojson }}",
        {"messages": [{"role": "<é>", "content": ""}]},
        '{"role": "<é>", "content": ""}',
    ),
    "strftime_now": ("{{ strftime_now('%Y') | length }}", {}, "4"),
    "break": ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", {}, "1"),
    "generation": ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", {}, "hi!"),
    "variables of the request": (TOOLS_AND_MORE, {"template_kwargs": {"more": False}}, "none False"),
    "tools": (TOOLS_AND_MORE, {"tools": [{"type": "function"}], "template_kwargs": {"more": 1}}, "1 1"),
    "no other messages": (CONTENTS, {"template_kwargs": {"messages": []}}, "[user:hi]"),
    "developer as system": (CONTENTS, {"messages": [DEVELOPER, USER]}, "[system:be brief][user:hi]"),
    "developer if the template has it": (
        CONTENTS + "{# developer #}",
        {"messages": [DEVELOPER]},
        "[developer:be brief]",
    ),
    "reasoning under both names": (
        "{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}",
        {"messages": [THINKING]},
        "22",
    ),
    "calls as objects": (
        "{{ tools or messages[0].tool_calls[0].function.arguments.city }}",
        {"messages": [CALLED]},
        "Rome",
    ),
    "tools as messages": (
        CONTENTS.replace("m.content", "m.content[:5]"),
        {"messages": TURNS, "tools": [TOOL]},
        AS_TEXT,
    ),
}
"""For each case: a template, its arguments (by default one message of the user), and the text."""


@pytest.mark.parametrize("name", RENDERED)
def test_templates_get_messages_variables_and_functions(name: str) -> None:
    source, changes, text = RENDERED[name]
    before = json.dumps(changes)
    arguments: dict[str, Any] = {"messages": [USER], **changes}
    assert ChatTemplate(source, named_tokens={"bos_token": "<s>"}).render(**arguments).text == text
    assert json.dumps(changes) == before


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="empty") as raised:
        ChatTemplate(CHAT_TEMPLATE).render([])
    assert raised.value.param == "messages"


def continued(source: str, messages: Sequence[Mapping[str, object]]) -> str:
    return ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True).text


def test_the_last_message_can_be_left_open_to_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer "}]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer "
    assert continued(CHAT_TEMPLATE, messages) == expected
    assert continued("{{ messages[-1].content | trim }}</s>", messages) == "The answer"


TRIMMING = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, TRIMMING, TRIMMING.replace("trim", "rstrip()"), LLAMA])
@pytest.mark.parametrize("content", ["", " ", "\n", " \n\n "])
def test_an_empty_or_blank_last_message_is_continued_as_a_new_answer(source: str, content: str) -> None:
    """A template that trims contents lost the line break of the turn's header."""
    source = source.replace(" | rstrip()", ".rstrip()")
    shown = content if source is CHAT_TEMPLATE else ""
    expected = ChatTemplate(source).render([USER]).text + shown
    assert continued(source, [USER, {"role": "assistant", "content": content}]) == expected


@pytest.mark.parametrize("source", [TRIMMING, LLAMA])
def test_a_continued_message_is_trimmed_like_other_messages(source: str) -> None:
    message = {"role": "assistant", "content": " \n one two \n"}
    assert continued(source, [USER, message]) == ChatTemplate(source).render([USER]).text + "one two"


def test_a_message_that_the_template_changes_cannot_be_continued() -> None:
    with pytest.raises(RequestError) as raised:
        continued("{{ messages[0].role }}", [USER])
    assert raised.value.param == "continue_final_message"


def test_continuing_and_a_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(RequestError) as raised:
        ChatTemplate(CHAT_TEMPLATE).render([USER], continue_final_message=True)
    assert raised.value.param == "continue_final_message"


CALLS_TEMPLATE = "{{ tools or '' }}{% for c in messages[0].tool_calls %}EACH{% endfor %}"


@pytest.mark.parametrize("sent", ['{"city": "Köln", "days": [1, null]}', {"city": "Köln", "days": [1, None]}])
@pytest.mark.parametrize(
    ("each", "text"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Köln", "days": [1, null]}'),
        ("{{ '<' + c.function.arguments + '>' }}", '<{"city": "Köln", "days": [1, null]}>'),
        ("{{ c.function.arguments + '>' }}", '{"city": "Köln", "days": [1, null]}>'),
        ("{{ '<' ~ c.function.arguments }}", '<{"city": "Köln", "days": [1, null]}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}", "city=Köln days=[1, None] "),
        ("{{ c.function.arguments is mapping }}", "True"),
    ],
)
def test_templates_can_use_arguments_as_json_as_a_string_and_as_an_object(sent: object, each: str, text: str) -> None:
    assert render(CALLS_TEMPLATE.replace("EACH", each), calling(sent)) == text


@pytest.mark.parametrize("sent", ["", "  ", "{}", {}])
def test_no_arguments_are_an_empty_object(sent: object) -> None:
    assert render(CALLS_TEMPLATE.replace("EACH", "{{ c.function.arguments | tojson }}"), calling(sent)) == "{}"


@pytest.mark.parametrize("invalid", ['{"city": ', "Köln", "[1]", '"{}"', "[" * 100_000])
def test_arguments_that_are_not_an_object_are_refused_with_their_place(invalid: object) -> None:
    with pytest.raises(RequestError) as caught:
        plain_messages([USER, calling(invalid)])
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


# For a template without tools, tools, earlier calls and their results become plain text.
def test_tools_are_described_in_a_separate_system_message() -> None:
    first, second = with_tools_as_text([{"role": "user", "content": "Hi"}], [TOOL])
    assert second == {"role": "user", "content": "Hi"}
    assert first["role"] == "system"
    assert str(first["content"]).startswith("# Tools\n")
    assert (
        '<tools>\n{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}\n</tools>'
        in str(first["content"])
    )
    assert str(first["content"]).endswith("</tool_call>")


def test_tools_are_described_after_the_text_of_a_system_message() -> None:
    both = with_tools_as_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], [TOOL])
    assert [message["role"] for message in both] == ["system", "user"]
    assert str(both[0]["content"]).startswith("Be brief.\n\n# Tools\n")


def test_calls_are_rendered_in_the_model_s_format_and_results_are_merged() -> None:
    _, question, call, results, thanks = with_tools_as_text(plain_messages(TURNS), [TOOL])
    assert question == {"role": "user", "content": "How is the weather?"}
    call_text = f'{HERMES_BEGIN}\n{{"name": "get_weather", "arguments": {{"city": "Köln"}}}}\n{HERMES_END}'
    assert call == {"role": "assistant", "content": f"Let me see.\n{call_text}\n{call_text}"}
    assert results == {
        "role": "user",
        "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>",
    }
    assert thanks == {"role": "user", "content": "Thanks!"}


def test_the_time_to_merge_results_grows_with_their_length() -> None:
    started_s = time.process_time()
    [merged] = with_tools_as_text([{"role": "tool", "content": "x" * 800}] * 9000, [])
    assert time.process_time() - started_s < 1  # with a copy of the text for each result, 3 s
    assert str(merged["content"]).count("<tool_response>\n" + "x" * 800 + "\n</tool_response>") == 9000


def test_a_message_of_the_user_is_no_result() -> None:
    user, result = with_tools_as_text([{"role": "user", "content": "<tool_response>"}, TURNS[2]], [])
    assert user["content"] == "<tool_response>"
    assert result["content"] == "<tool_response>\nrain\n</tool_response>"


def test_a_message_without_text_has_only_its_call() -> None:
    without_text: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    [message] = with_tools_as_text(plain_messages([without_text]), [])
    assert str(message["content"]).startswith(HERMES_BEGIN)


def test_a_call_rendered_as_text_is_parsed_as_the_same_call() -> None:
    [message] = with_tools_as_text(plain_messages([{"role": "assistant", "content": "", "tool_calls": [CALL]}]), [])
    region = str(message["content"]).removeprefix(HERMES_BEGIN).removesuffix(HERMES_END)
    tool = Tool(name="get_weather", parameters={}, strict=False)
    [call] = HERMES.parse(Cursor(region, final=True), [tool]).calls
    assert (call.name, call.arguments, call.complete) == ("get_weather", '{"city": "Köln"}', True)
