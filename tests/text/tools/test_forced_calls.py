"""An answer that is cut off before the arguments of a forced call start does not show the call, in each format."""

import random
from collections.abc import Iterator, Sequence

import pytest

from motet.text.answers import CallRules, ForcedCalls, ReasoningRules, ReasoningState, tagged_format
from motet.text.formats import FORMATS
from motet.text.harmony import HARMONY, harmony_format
from motet.text.parts import Content, Part, Reasoning
from motet.text.reasoning import tags_named
from motet.text.tools.tool_format import Tool, ToolFormat, ToolMode, ToolRules
from tests.text.small_format import joined
from tests.text.tools.walks import Walker

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
WEATHER = Tool(name="get_weather", parameters={**PARAMETERS, "additionalProperties": False}, strict=True)
FORM = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
CALLING = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'


def parsed(
    form: ToolFormat, text: str, forced: ForcedCalls, *, pieces: bool = False, reasoning: bool = False
) -> list[Part]:
    rules = CallRules(form, (WEATHER,), parallel=True, forced=forced)
    thoughts = ReasoningRules(tags_named("think"), ReasoningState.POSSIBLE, separate=True) if reasoning else None
    parser = (harmony_format(rules) if form is HARMONY else tagged_format(thoughts, rules)).parser()
    parts = [part for piece in (text if pieces else [text]) for part in parser.feed(piece, [0])]
    return joined(parts + parser.close(cut=True))


def content(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def calls(form: ToolFormat, *, parallel: bool) -> str:
    """Returns a text that the grammar for required calls allows."""
    rules = ToolRules(callable=(WEATHER,), mode=ToolMode.REQUIRED, parallel=parallel)
    walker = Walker(form.grammar(rules, {}))
    texts = (walker.walk(random.Random(seed), preferred=["Paris"]) for seed in range(100))
    return next(text for text in texts if text and (text.count("get_weather") > 1) is parallel)


def cuts(text: str) -> Iterator[str]:
    yield from (text[:end] for end in range(len(text)))


@FORM
@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_required_call_is_never_content(form: ToolFormat, parallel: bool) -> None:
    for start in cuts(calls(form, parallel=parallel)):
        whole = parsed(form, start, ForcedCalls.EVERYWHERE)
        assert content(whole) == ""
        assert content(parsed(form, start, ForcedCalls.EVERYWHERE, pieces=True)) == ""


@FORM
def test_a_required_call_after_reasoning_is_never_content(form: ToolFormat) -> None:
    for start in cuts(f"<think>Where?</think>\n{calls(form, parallel=False)}"):
        parts = parsed(form, start, ForcedCalls.EVERYWHERE, reasoning=True)
        assert content(parts) == ""
        if "?" in start:
            assert Reasoning("Where?") in parts or not start.endswith("</think>")


@pytest.mark.parametrize("forced", [ForcedCalls.EVERYWHERE, ForcedCalls.AFTER_TAG])
def test_a_forced_call_in_harmony_is_never_content(forced: ForcedCalls) -> None:
    pieces = CALLING.replace("<|", "\0<|").replace("|>", "|>\0").split("\0")
    texts = ["".join(pieces[:end]) for end in range(len(pieces))]
    for start in (*texts, CALLING[: CALLING.index("weather")], CALLING[: CALLING.index("json")]):
        assert content(parsed(HARMONY, start, forced)) == ""
    assert content(parsed(HARMONY, "<|channel|>final<|message|>It is", ForcedCalls.AFTER_TAG)) == "It is"


@FORM
def test_text_before_a_call_stays_content_if_the_grammar_forces_the_call_only_after_its_tag(form: ToolFormat) -> None:
    call = calls(form, parallel=False)
    before = "" if form.bare else "Let me see. "
    for start in cuts(call):
        shown = content(parsed(form, before + start, ForcedCalls.AFTER_TAG))
        if form.bare or form.opening_tags[0] in start:
            assert shown.strip() == before.strip()
        else:
            assert shown.strip() == (before + start).strip()


@FORM
def test_text_that_can_be_the_requested_json_stays_content(form: ToolFormat) -> None:
    for start in cuts('{"city": "Paris <tool_call> in"}'):
        assert content(parsed(form, start, ForcedCalls.OR_JSON)) == content(parsed(form, start, ForcedCalls.NOWHERE))
    call = calls(form, parallel=False)
    if call.startswith("<"):
        for start in cuts(call):
            assert content(parsed(form, start, ForcedCalls.OR_JSON)) == ""


@FORM
def test_a_call_that_is_not_forced_is_content_if_it_is_cut_off_before_its_arguments(form: ToolFormat) -> None:
    start = calls(form, parallel=False).partition("get_")[0] + "get_"
    assert content(parsed(form, start, ForcedCalls.NOWHERE)).strip() == start.strip()
