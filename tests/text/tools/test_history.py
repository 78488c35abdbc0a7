"""Earlier calls reach templates as objects, whatever way a template writes them."""

import json

import pytest

from motet.errors import RequestError
from motet.text.messages import Message
from motet.text.template import ChatTemplate
from motet.text.tools.history import with_arguments_read


def calling(arguments: object) -> list[Message]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def written(arguments: object, expression: str) -> str:
    """By a template that knows tools: any other gets calls as text."""
    calls = f"{{% for c in m.tool_calls or [] %}}{expression}{{% endfor %}}"
    return ChatTemplate(f"{{{{ tools or '' }}}}{{% for m in messages %}}{calls}{{% endfor %}}").render(
        with_arguments_read(calling(arguments))
    )


@pytest.mark.parametrize("sent", ['{"city": "Köln", "days": [1, null]}', {"city": "Köln", "days": [1, None]}])
def test_a_template_may_write_arguments_as_json_as_a_string_and_one_by_one(sent: object) -> None:
    text = '{"city": "Köln", "days": [1, null]}'
    assert written(sent, "{{ c.function.arguments | tojson }}") == text
    assert written(sent, "{{ '<' + c.function.arguments + '>' }}") == f"<{text}>"
    assert written(sent, "{{ c.function.arguments + '>' }}") == f"{text}>"
    assert written(sent, "{{ '<' ~ c.function.arguments }}") == f"<{text}"
    assert written(sent, "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}") == (
        "city=Köln days=[1, None] "
    )
    assert written(sent, "{{ c.function.arguments is mapping }}") == "True"


@pytest.mark.parametrize("sent", [None, "", "  ", "{}", {}])
def test_no_arguments_are_an_empty_object(sent: object) -> None:
    assert written(sent, "{{ c.function.arguments | tojson }}") == "{}"


@pytest.mark.parametrize("wrong", ['{"city": ', "Köln", "[1]", '"{}"', 3, ["{}"], "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_by_the_place_they_stand_at(wrong: object) -> None:
    with pytest.raises(RequestError) as caught:
        with_arguments_read(calling(wrong))
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("call", "messages[0].tool_calls"),
        (["call"], "messages[0].tool_calls[0].function"),
        ([{"id": "1"}], "messages[0].tool_calls[0].function"),
        ([{"function": {"arguments": "{}"}}], "messages[0].tool_calls[0].function.name"),
    ],
)
def test_a_call_of_another_shape_is_refused(calls: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        with_arguments_read([{"role": "assistant", "tool_calls": calls}])
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_stands_under_both_of_its_names(name: str) -> None:
    [message] = with_arguments_read([{"role": "assistant", "content": "4", name: "2 and 2"}])
    assert (message["reasoning"], message["reasoning_content"]) == ("2 and 2", "2 and 2")


def test_what_a_client_sent_is_left_as_it_was() -> None:
    messages = calling('{"city": "Paris"}')
    before = json.dumps(messages)
    with_arguments_read(messages)
    assert json.dumps(messages) == before
