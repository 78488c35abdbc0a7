"""Chat messages rendered by Jinja templates, and what clients are told when that does not work."""

from collections.abc import Mapping, Sequence

import pytest

from motet.errors import ModelLoadError, RequestError
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import CHAT_TEMPLATE, build_tiny_tokenizer

USER = {"role": "user", "content": "hi"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}],
}
LAST_CONTENT = "{{ messages[-1]['content'] }}"
CONTENTS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def render(source: str, *messages: Mapping[str, object]) -> str:
    return ChatTemplate(source).render(messages or [USER])


def test_the_models_template_is_rendered() -> None:
    tokenizer = Tokenizer(build_tiny_tokenizer(), chat_template=CHAT_TEMPLATE)
    assert ChatTemplate.of(tokenizer).render([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_generation_prompt_may_be_left_out() -> None:
    text = ChatTemplate(CHAT_TEMPLATE).render([USER], add_generation_prompt=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_model_without_a_template_says_so_and_what_to_do() -> None:
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
        ("{{ 'x'.encode('no such') }}", "unknown encoding"),
    ],
)
def test_what_a_template_raises_is_the_clients_error(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        render(source)
    assert raised.value.param == "messages"


def test_templates_know_the_models_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ pad_token is defined }}", named_tokens={"bos_token": "<s>"})
    assert template.render([USER]) == "<s>False"


def test_templates_have_the_functions_that_transformers_gives_them() -> None:
    assert render("{{ messages[0] | tojson }}", {"role": "user", "content": "<é>"}) == (
        '{"role": "user", "content": "<é>"}'
    )
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_tools_and_extra_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ tools | length if tools else 'none' }} {{ thinking }}")
    assert template.render([USER], template_kwargs={"thinking": False}) == "none False"
    assert template.render([USER], tools=[{"type": "function"}], template_kwargs={"thinking": 1}) == "1 1"


def test_extra_variables_cannot_replace_the_messages() -> None:
    assert ChatTemplate(CONTENTS).render([USER], template_kwargs={"messages": []}) == "[user:hi]"


def test_developer_is_system_for_a_template_that_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "be brief"}, USER]
    assert render(CONTENTS, *messages) == "[system:be brief][user:hi]"
    assert render(CONTENTS + "{# developer #}", *messages) == "[developer:be brief][user:hi]"
    assert messages[0]["role"] == "developer"


def test_text_parts_are_joined_by_a_newline() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(LAST_CONTENT, {"role": "user", "content": parts}) == "one\ntwo"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}], "messages[0].content[1]"),
        ([{"type": "text"}], "messages[0].content[0]"),
        (["a"], "messages[0].content[0]"),
        (7, "messages[0].content"),
    ],
)
def test_content_that_is_not_text_is_refused_by_name(content: object, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        render(CONTENTS, {"role": "user", "content": content})
    assert raised.value.param == param
    assert param in raised.value.message


def test_no_content_is_empty_text_except_beside_tool_calls() -> None:
    assert render(CONTENTS, {"role": "assistant", "content": None}, {"role": "user"}) == "[assistant:][user:]"
    assert render("{% if tools %}{% endif %}{{ messages[0].content is none }}", CALLED) == "True"


def test_a_template_that_knows_tools_gets_calls_with_their_arguments_as_objects() -> None:
    assert render("{% if tools %}{% endif %}{{ messages[0].tool_calls[0].function.arguments.city }}", CALLED) == "Paris"


def test_a_template_that_knows_no_tools_gets_them_in_messages() -> None:
    tool = {"type": "function", "function": {"name": "get_weather"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    told = ChatTemplate(CONTENTS).render([USER, CALLED, result], tools=[tool])
    assert told.startswith("[system:# Tools")
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in told
    assert told.endswith("[user:<tool_response>\nrain\n</tool_response>]")
    assert ChatTemplate(CONTENTS).render([USER]) == "[user:hi]"


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="empty") as raised:
        ChatTemplate(CHAT_TEMPLATE).render([])
    assert raised.value.param == "messages"


def continued(source: str, messages: Sequence[Mapping[str, object]]) -> str:
    return ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_the_last_message_may_be_left_open_to_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer "}]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer "
    assert continued(CHAT_TEMPLATE, messages) == expected
    assert continued("{{ messages[-1].content | trim }}</s>", messages) == "The answer"


def test_a_message_the_template_hides_cannot_be_continued() -> None:
    with pytest.raises(RequestError) as raised:
        continued("{{ messages[0].role }}", [USER])
    assert raised.value.param == "continue_final_message"


def test_continuing_and_a_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(RequestError) as raised:
        ChatTemplate(CHAT_TEMPLATE).render([USER], continue_final_message=True)
    assert raised.value.param == "continue_final_message"
