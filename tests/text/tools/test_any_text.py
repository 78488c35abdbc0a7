"""Whatever stands in a region, a format reads it without failing, and takes nothing back that it told of a call."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.text.tools.base import ToolFormat
from motet.text.tools.cursor import Cursor, EndOfText, NotACall, decoded
from motet.text.tools.formats import FORMATS
from tests.text.tools.recordings import recorded
from tests.text.tools.test_recorded import check_growth

LETTERS = st.sampled_from(
    ['"', "'", "{", "}", "[", "]", "(", ")", ",", ":", ";", "=", "\\", "\n", " ", "é", "\ud800", "1"]
)
WORDS = st.sampled_from(
    ["null", "true", "-0.5e3", '"name": ', '"arguments": ', '"a": ', "get_time", "add", "city", "\\u00e9"]
)


def pieces_of(name: str) -> list[str]:
    """Of what models wrote in a format: whole, and cut at their tags and brackets."""
    form = FORMATS[name]
    texts = [answer.text for known, answer in recorded() if known == name]
    for mark in (*form.begins, *form.inner, *form.ends, "\n", "}", "{", ")", ">"):
        texts = [piece for text in texts for piece in (*text.split(mark), mark)]
    return sorted(set(texts))


def texts(name: str) -> st.SearchStrategy[str]:
    pieces = st.one_of(st.sampled_from(pieces_of(name)), LETTERS, WORDS)
    return st.lists(pieces, max_size=24).map("".join)


def broken(name: str) -> st.SearchStrategy[str]:
    """What a model wrote, with something put in the place of a part of it."""
    answers = st.sampled_from([answer.text for known, answer in recorded() if known == name])
    places = st.tuples(st.integers(0, 200), st.integers(0, 6))
    form = FORMATS[name]

    def put(text: str, place: tuple[int, int], piece: str) -> str:
        region = text
        for begin in form.begins:
            region = region.partition(begin)[2] or region
        start = place[0] % (len(region) + 1)
        return region[:start] + piece + region[start + place[1] :]

    return st.builds(put, answers, places, st.one_of(LETTERS, WORDS, st.just("")))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(st.data())
def test_any_text_is_read(form: ToolFormat, data: st.DataObject) -> None:
    check_growth(form, data.draw(texts(form.name) | broken(form.name)))


JSON = st.recursive(
    st.sampled_from(["null", "true", "-1.5e+3", "0", '""', '"a\\u00e9\\n}"']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | st.lists(inner, max_size=3).map(lambda parts: "{" + ",".join(f'"k" : {part}' for part in parts) + "}")
    ),
    max_leaves=8,
)


@given(JSON, st.sampled_from(["", " ", ",", "}", "]x", "</tool_call>"]))
def test_a_value_of_json_ends_where_it_ends(text: str, behind: str) -> None:
    span = Cursor(text + behind).value()
    if span.whole:
        assert span.end == len(text)
    else:
        assert text[0] in "-0nt"  # a number or a word may go on
        assert not behind.strip()


@given(JSON, st.integers(0, 100))
def test_a_beginning_of_json_is_never_wrong(text: str, cut: int) -> None:
    span = Cursor(text[: cut % len(text)]).value()
    assert not span.whole


@given(st.lists(st.one_of(LETTERS, WORDS, JSON), max_size=6).map("".join))
def test_what_is_whole_is_json_and_what_is_wrong_is_not(text: str) -> None:
    try:
        span = Cursor(text).value()
    except NotACall:
        with pytest.raises(NotACall):
            decoded(text)
    else:
        if span.whole and "\n" not in text:
            decoded(text[: span.end])


@pytest.mark.parametrize(("literal", "text"), [("<a>", ""), ("<a>", "<"), ("<a>", "<a")])
def test_a_literal_that_may_still_come_is_awaited(literal: str, text: str) -> None:
    with pytest.raises(EndOfText):
        Cursor(text).literal(literal)
    with pytest.raises(NotACall):
        Cursor(f"{text} ").literal(literal)
