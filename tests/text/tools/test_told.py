"""A template without tools is told of them, of earlier calls and of their results as plain text."""

from motet.text.messages import Message
from motet.text.template import ChatTemplate
from motet.text.tools.base import Tool
from motet.text.tools.hermes import BEGIN, END, read
from motet.text.tools.history import with_arguments_read
from motet.text.tools.told import told_in_messages

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
TURNS: list[Message] = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    {"role": "user", "content": "Thanks!"},
]


def test_tools_are_told_in_a_system_message_of_their_own() -> None:
    first, second = told_in_messages([{"role": "user", "content": "Hi"}], [TOOL])
    assert second == {"role": "user", "content": "Hi"}
    assert first["role"] == "system"
    assert str(first["content"]).startswith("# Tools\n")
    assert (
        '<tools>\n{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}\n</tools>'
        in str(first["content"])
    )
    assert str(first["content"]).endswith("</tool_call>")


def test_a_system_message_that_is_there_says_its_own_words_first() -> None:
    told = told_in_messages([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], [TOOL])
    assert [message["role"] for message in told] == ["system", "user"]
    assert str(told[0]["content"]).startswith("Be brief.\n\n# Tools\n")


def test_calls_are_written_as_the_model_would_and_results_that_follow_each_other_are_one_message() -> None:
    _, question, call, results, thanks = told_in_messages(with_arguments_read(TURNS), [TOOL])
    assert question == {"role": "user", "content": "How is the weather?"}
    written = f'{BEGIN}\n{{"name": "get_weather", "arguments": {{"city": "Köln"}}}}\n{END}'
    assert call == {"role": "assistant", "content": f"Let me see.\n{written}\n{written}"}
    assert results == {
        "role": "user",
        "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>",
    }
    assert thanks == {"role": "user", "content": "Thanks!"}


def test_a_call_without_words_is_all_that_its_message_says() -> None:
    quiet: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    [message] = told_in_messages(with_arguments_read([quiet]), [])
    assert str(message["content"]).startswith(BEGIN)


def test_what_is_written_of_a_call_is_read_as_that_call() -> None:
    [message] = told_in_messages(with_arguments_read([{"role": "assistant", "tool_calls": [CALL]}]), [])
    region = str(message["content"]).removeprefix(BEGIN).removesuffix(END)
    tool = Tool(name="get_weather", parameters={}, strict=False)
    [call] = read(region, True, [tool]).calls
    assert (call.name, call.arguments, call.whole) == ("get_weather", '{"city": "Köln"}', True)


def test_a_template_without_tools_gets_messages_of_three_roles() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content[:5] }}\n{% endfor %}"
    text = ChatTemplate(source).render(TURNS, tools=[TOOL])
    assert text == "system: # Too\nuser: How i\nassistant: Let m\nuser: <tool\nuser: Thank\n"
