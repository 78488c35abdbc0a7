"""The beginning of a JSON value is told apart from what no more text can make one."""

import pytest

from motet.text.tools.cursor import Cursor, NotACall, decoded, repaired

UNFINISHED = [
    "",
    " ",
    "{",
    '{"a',
    '{"a" ',
    '{"a": ',
    '{"a": 1',
    '{"a": 1,',
    '{"a": {}, "b": [',
    '"\\',
    '"\\u12',
    '"\\ud83d',
    "-",
    "1.",
    "1e",
    "1e+",
    "12",
    "tru",
    "n",
    "[[",
    "[1, ",
    '"line\nbreak',
]
WRONG = [
    '"\\q',
    '"\\u12g',
    '"\\\n',
    "01",
    "+1",
    ".5",
    "1.e5",
    "--1",
    "nux",
    "True",
    "NaN",
    "Infinity",
    "'a'",
    "{'a'",
    "{a",
    "{1",
    '{"a" 1',
    '{"a": 1 x',
    '{"a": "x"y',
    '{"a": 1,}',
    '{"a": 1]',
    "[1,]",
    "[1}",
    "[,",
    "{,",
    "}",
    "<",
]


@pytest.mark.parametrize("text", UNFINISHED)
def test_a_beginning_may_go_on(text: str) -> None:
    span = Cursor(text).value()
    assert (span.start, span.end, span.whole) == (0, len(text), False)


@pytest.mark.parametrize("text", WRONG)
def test_what_json_never_has_is_seen_at_once(text: str) -> None:
    for behind in (" ", '"', "}"):
        with pytest.raises(NotACall):
            Cursor(text + behind).value()


@pytest.mark.parametrize("text", ['{"a": "}"}', "[]", '{"": {"": []}}', '"\\""', '[1, 2.5e-3, "\\u00e9", null]'])
def test_a_value_ends_with_its_last_bracket_whatever_follows(text: str) -> None:
    for behind in ("", "}", " tail", "</tool_call>"):
        span = Cursor(f"x{text}{behind}", 1).value()
        assert (span.start, span.end, span.whole) == (1, 1 + len(text), True)


def test_control_characters_are_escaped_inside_strings_only() -> None:
    text = '{\n"a": "one\ntwo\tthree \\n \\" \n",\t"b": ""\n}'
    assert repaired(text) == '{\n"a": "one\\ntwo\\tthree \\n \\" \\n",\t"b": ""\n}'
    assert decoded(repaired(text)) == {"a": 'one\ntwo\tthree \n " \n', "b": ""}
    for cut in range(len(text) + 1):
        assert repaired(text).startswith(repaired(text[:cut]))
