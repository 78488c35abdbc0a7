"""A format parses any text in a region without an error, and never changes the part of a call that was sent."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.text.formats import FORMATS
from motet.text.tools.cursor import Cursor, EndOfText, NotACall, TextSpan, decoded, repaired
from motet.text.tools.tool_format import ToolFormat
from tests.property_settings import examples
from tests.text.tools.recordings import recorded
from tests.text.tools.test_recorded import check_growth

LETTERS = st.sampled_from(
    ['"', "'", "{", "}", "[", "]", "(", ")", ",", ":", ";", "=", "\\", "\n", " ", "é", "\ud800", "1"]
)
WORDS = st.sampled_from(
    ["null", "true", "-0.5e3", '"name": ', '"arguments": ', '"a": ', "get_time", "add", "city", "\\u00e9"]
)


def pieces_of(name: str) -> list[str]:
    """Returns the recorded answers in a format, complete and split at their tags and brackets."""
    form = FORMATS[name]
    texts = [answer.text for known, answer in recorded() if known == name]
    for mark in (*form.opening_tags, *form.inner_tags, *form.closing_tags, "\n", "}", "{", ")", ">"):
        texts = [piece for text in texts for piece in (*text.split(mark), mark)]
    return sorted(set(texts))


@cache
def texts(name: str) -> st.SearchStrategy[str]:
    pieces = st.one_of(st.sampled_from(pieces_of(name)), LETTERS, WORDS)
    return st.lists(pieces, max_size=24).map("".join)


@cache
def broken(name: str) -> st.SearchStrategy[str]:
    """Generates recorded answers in which a part is replaced."""
    answers = st.sampled_from([answer.text for known, answer in recorded() if known == name])
    positions = st.tuples(st.integers(0, 200), st.integers(0, 6))
    form = FORMATS[name]

    def replaced(text: str, position: tuple[int, int], piece: str) -> str:
        region = text
        for opening in form.opening_tags:
            region = region.partition(opening)[2] or region
        start = position[0] % (len(region) + 1)
        return region[:start] + piece + region[start + position[1] :]

    return st.builds(replaced, answers, positions, st.one_of(LETTERS, WORDS, st.just("")))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@examples(40)
@given(st.data())
def test_any_text_can_be_parsed(form: ToolFormat, data: st.DataObject) -> None:
    check_growth(form, data.draw(texts(form.name) | broken(form.name)))


@pytest.mark.parametrize("quotes", ["'''", '"""'])
def test_a_string_after_a_word_is_invalid_from_its_first_quote_on(quotes: str) -> None:
    """The bug: two quotes were refused, but three were accepted as the start of a string."""
    check_growth(FORMATS["olmo3"], f"get_time(null{quotes}")


JSON = st.recursive(
    st.sampled_from(["null", "true", "-1.5e+3", "0", '""', '"a\\u00e9\\n}"', '"line\nbreak"']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | st.lists(inner, max_size=3).map(lambda parts: "{" + ",".join(f'"k" : {part}' for part in parts) + "}")
    ),
    max_leaves=8,
)


@given(JSON, st.sampled_from(["", " ", ",", "}", "]x", "</tool_call>"]))
def test_the_end_of_a_json_value_is_found_whatever_follows(text: str, after: str) -> None:
    span = Cursor(text + after).read_value()
    if span.complete:
        assert span.end == len(text)
    else:
        assert text[0] in "-0nt"  # a number or a word can continue
        assert not after.strip()


@given(JSON, st.integers(0, 100))
def test_the_start_of_json_is_never_invalid(text: str, cut: int) -> None:
    cut %= len(text)
    assert Cursor(text[:cut]).read_value() == TextSpan(0, cut, complete=False)


@given(st.lists(st.one_of(LETTERS, WORDS, JSON), max_size=6).map("".join))
def test_a_complete_value_is_json_and_an_invalid_one_is_not(text: str) -> None:
    try:
        span = Cursor(text).read_value()
    except NotACall:
        with pytest.raises(NotACall):
            decoded(text)
    else:
        if span.complete and "\n" not in text:
            decoded(text[: span.end])


@pytest.mark.parametrize(("literal", "text"), [("<a>", ""), ("<a>", "<"), ("<a>", "<a")])
def test_a_literal_that_more_text_can_complete_is_awaited(literal: str, text: str) -> None:
    with pytest.raises(EndOfText):
        Cursor(text).expect(literal)
    with pytest.raises(NotACall):
        Cursor(f"{text} ").expect(literal)


INVALID_WORDS = "01 +1 .5 1.e5 --1 nux True NaN Infinity 'a' {'a' {a {1 [1,] [1} [, {, } <"
INVALID = ('"\\q', '"\\u12g', '"\\\n', '{"a" 1', '{"a": 1 x', '{"a": "x"y', '{"a": 1,}', '{"a": 1]')


@pytest.mark.parametrize("text", [*INVALID_WORDS.split(), *INVALID])
def test_text_that_can_never_be_json_is_refused_at_once(text: str) -> None:
    for after in (" ", '"', "}"):
        with pytest.raises(NotACall):
            Cursor(text + after).read_value()


@pytest.mark.parametrize("text", ['{"a": "}"}', "[]", '{"": {"": []}}', '"\\""', '[1, 2.5e-3, "\\u00e9", null]'])
def test_a_value_ends_with_its_last_bracket_whatever_follows(text: str) -> None:
    for after in ("", "}", " tail", "</tool_call>"):
        cursor = Cursor(f"x{text}{after}")
        cursor.expect("x")
        span = cursor.read_value()
        assert (span.start, span.end, span.complete) == (1, 1 + len(text), True)


def test_control_characters_are_escaped_inside_strings_only() -> None:
    text = '{\n"a": "one\ntwo\tthree \\n \\" \n",\t"b": ""\n}'
    assert repaired(text) == '{\n"a": "one\\ntwo\\tthree \\n \\" \\n",\t"b": ""\n}'
    assert decoded(repaired(text)) == {"a": 'one\ntwo\tthree \n " \n', "b": ""}
    for cut in range(len(text) + 1):
        assert repaired(text).startswith(repaired(text[:cut]))
