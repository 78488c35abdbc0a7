"""Recorded answers are read the same however they are cut, and the known part of a call only grows."""

import dataclasses
import json
from collections.abc import Sequence

import pytest

from motet.text.formats import FORMATS
from motet.text.tools.cursor import Cursor
from motet.text.tools.tool_format import ParsedCall, ParsedRegion, Tool, ToolFormat
from tests.text.tools.recordings import TOOLS, Recorded, read, recorded

ANSWERS = [pytest.param(FORMATS[name], answer, id=f"{name}: {answer.name}") for name, answer in recorded()]


def richness(answer: Recorded) -> tuple[int, int]:
    return len(answer.calls), -len(answer.text)


RICHEST = {name: max((one for other, one in recorded() if other == name), key=richness) for name in FORMATS}
SOME_LONG = [
    pytest.param(*one.values, id=one.id, marks=[] if one.values[1] in RICHEST.values() else pytest.mark.long)
    for one in ANSWERS
]
"""The answer of each format that has most calls, and then the shortest; `make test-long` tries all."""


def regions(form: ToolFormat, answer: Recorded) -> list[str]:
    """Returns the whole regions that the format was given to read."""
    seen: list[str] = []

    def remember(cursor: Cursor, tools: Sequence[Tool]) -> ParsedRegion:
        seen.append(cursor.text)
        return form.read(cursor, tools)

    read(dataclasses.replace(form, read=remember), [answer.text])
    return [text for text in dict.fromkeys(seen) if not any(other != text and other.startswith(text) for other in seen)]


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_an_answer_is_read_as_it_was_meant(form: ToolFormat, answer: Recorded) -> None:
    content, calls = read(form, [answer.text])
    assert content == answer.content
    if answer.begun:
        *whole, (name, begun) = calls
        *meant, (meant_name, longest) = answer.calls
        assert whole == meant
        assert name == meant_name
        assert longest.startswith(begun)
    else:
        assert calls == answer.calls
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_an_answer_is_read_the_same_letter_by_letter(form: ToolFormat, answer: Recorded) -> None:
    assert read(form, answer.text) == read(form, [answer.text])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "answer"), SOME_LONG)
def test_an_answer_is_read_the_same_wherever_it_is_cut(form: ToolFormat, answer: Recorded) -> None:
    whole = read(form, [answer.text])
    for cut in range(1, len(answer.text)):
        assert read(form, [answer.text[:cut], answer.text[cut:]]) == whole


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_the_known_part_of_a_call_only_grows(form: ToolFormat, answer: Recorded) -> None:
    for region in regions(form, answer):
        check_growth(form, region)


def check_growth(form: ToolFormat, region: str) -> None:
    last: tuple[ParsedCall, ...] = ()
    for cut in range(len(region) + 1):
        reading = form.read(Cursor(region[:cut]), TOOLS)
        if reading.malformed:
            assert form.read(Cursor(region), TOOLS).malformed
            assert form.read(Cursor(region, final=True), TOOLS).malformed
            check_beginning([call for call in last if call.whole], reading.calls)
            return
        check_beginning(last, reading.calls)
        last = reading.calls
        check_beginning(last, form.read(Cursor(region[:cut], final=True), TOOLS).calls)
    check_beginning(last, form.read(Cursor(region, final=True), TOOLS).calls)


def check_beginning(before: Sequence[ParsedCall], after: Sequence[ParsedCall]) -> None:
    assert len(before) <= len(after)
    for old, new in zip(before, after, strict=False):
        if old.whole:
            assert new == old
            assert isinstance(json.loads(old.arguments), dict)
        else:
            assert new.name == old.name
            assert new.arguments.startswith(old.arguments)
            with pytest.raises(json.JSONDecodeError):
                json.loads(old.arguments)
    assert all(call.whole for call in after[:-1])


def test_every_format_has_answers() -> None:
    assert {name for name, _ in recorded()} == set(FORMATS)
