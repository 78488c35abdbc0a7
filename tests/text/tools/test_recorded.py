"""Recorded answers are parsed in the same way wherever they are cut, and the known part of a call only grows."""

import dataclasses
import json
from collections.abc import Sequence

import pytest

from motet.text.formats import FORMATS
from motet.text.tools.cursor import Cursor
from motet.text.tools.tool_format import ParsedCall, ParsedRegion, Tool, ToolFormat
from tests.text.tools.recordings import TOOLS, RecordedAnswer, read, recorded

ANSWERS = [pytest.param(FORMATS[name], answer, id=f"{name}: {answer.name}") for name, answer in recorded()]


def rank(answer: RecordedAnswer) -> tuple[int, int]:
    return len(answer.calls), -len(answer.text)


LARGEST = {name: max((one for other, one in recorded() if other == name), key=rank) for name in FORMATS}
SOME_LONG = [
    pytest.param(*one.values, id=one.id, marks=[] if one.values[1] in LARGEST.values() else pytest.mark.long)
    for one in ANSWERS
]
"""All answers. Only the answer of each format with the maximum number of calls, and of these the shortest, is tested by
default; `make test-long` tests all."""


def regions(form: ToolFormat, answer: RecordedAnswer) -> list[str]:
    """Returns the complete regions that the format parses."""
    texts: list[str] = []

    def recording(cursor: Cursor, tools: Sequence[Tool]) -> ParsedRegion:
        texts.append(cursor.text)
        return form.parse(cursor, tools)

    read(dataclasses.replace(form, parse=recording), [answer.text])
    return [one for one in dict.fromkeys(texts) if not any(other != one and other.startswith(one) for other in texts)]


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_an_answer_has_the_expected_content_and_calls(form: ToolFormat, answer: RecordedAnswer) -> None:
    content, calls = read(form, [answer.text])
    assert content == answer.content
    if answer.partly_sent:
        *complete, (name, partial) = calls
        *expected, (expected_name, longest) = answer.calls
        assert complete == expected
        assert name == expected_name
        assert longest.startswith(partial)
    else:
        assert calls == answer.calls
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_an_answer_is_parsed_in_the_same_way_character_by_character(form: ToolFormat, answer: RecordedAnswer) -> None:
    assert read(form, answer.text) == read(form, [answer.text])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "answer"), SOME_LONG)
def test_an_answer_is_parsed_in_the_same_way_wherever_it_is_cut(form: ToolFormat, answer: RecordedAnswer) -> None:
    expected = read(form, [answer.text])
    for cut in range(1, len(answer.text)):
        assert read(form, [answer.text[:cut], answer.text[cut:]]) == expected


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_the_known_part_of_a_call_only_grows(form: ToolFormat, answer: RecordedAnswer) -> None:
    for region in regions(form, answer):
        check_growth(form, region)


def check_growth(form: ToolFormat, region: str) -> None:
    last: tuple[ParsedCall, ...] = ()
    for cut in range(len(region) + 1):
        parsed = form.parse(Cursor(region[:cut]), TOOLS)
        if parsed.malformed:
            assert form.parse(Cursor(region), TOOLS).malformed
            assert form.parse(Cursor(region, final=True), TOOLS).malformed
            check_extends([call for call in last if call.complete], parsed.calls)
            return
        check_extends(last, parsed.calls)
        last = parsed.calls
        check_extends(last, form.parse(Cursor(region[:cut], final=True), TOOLS).calls)
    check_extends(last, form.parse(Cursor(region, final=True), TOOLS).calls)


def check_extends(before: Sequence[ParsedCall], after: Sequence[ParsedCall]) -> None:
    assert len(before) <= len(after)
    for old, new in zip(before, after, strict=False):
        if old.complete:
            assert new == old
            assert isinstance(json.loads(old.arguments), dict)
        else:
            assert new.name == old.name
            assert new.arguments.startswith(old.arguments)
            with pytest.raises(json.JSONDecodeError):
                json.loads(old.arguments)
    assert all(call.complete for call in after[:-1])


def test_every_format_has_answers() -> None:
    assert {name for name, _ in recorded()} == set(FORMATS)
