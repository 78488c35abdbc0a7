"""Answers of tags, partial tags and other text: their parts do not depend on cuts, and no text is lost."""

from hypothesis import given
from hypothesis import strategies as st

from motet.text.answers import CallRules, ReasoningRules, ReasoningState, tagged_format
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.reasoning import tags_named
from tests.property.text_oracle import cut
from tests.text.small_format import joined, small_format, tool_rules

MARKS = '<think> </think> <call> </call> < </ <ca </thi f go h { } " a'
PIECES = st.sampled_from([*MARKS.split(), " ", "\n"])
TEXTS = st.one_of(
    st.lists(PIECES, max_size=16).map("".join),
    st.lists(
        st.sampled_from(
            ["<think>a ", "</think>", "<call>f{a}</call>", '<call>go{"</call>"}</call>', "<call>h{", "b\n"]
        ),
        max_size=8,
    ).map("".join),
)
CUTS = st.lists(st.integers(0, 60), max_size=12)


def read(
    text: str, cuts: list[int], at_start: ReasoningState, *, cut_off: bool, tools: bool = True, separate: bool = True
) -> list[Part]:
    form = CallRules(small_format(), tool_rules("f", "go").callable, parallel=True) if tools else None
    parser = tagged_format(ReasoningRules(tags_named("think"), at_start, separate=separate), form).parser()
    parts = [part for piece in cut(text, cuts) for part in parser.feed(piece, [0])]
    return joined(parts + parser.close(cut=cut_off))


@given(TEXTS, CUTS, st.sampled_from(ReasoningState), st.booleans(), st.booleans(), st.booleans())
def test_parts_do_not_depend_on_where_the_text_was_cut(
    text: str, cuts: list[int], at_start: ReasoningState, cut_off: bool, tools: bool, separate: bool
) -> None:
    expected = read(text, [], at_start, cut_off=cut_off, tools=tools, separate=separate)
    assert read(text, cuts, at_start, cut_off=cut_off, tools=tools, separate=separate) == expected


@given(TEXTS, CUTS, st.sampled_from(ReasoningState), st.booleans())
def test_without_tools_and_reasoning_the_content_is_the_text(
    text: str, cuts: list[int], at_start: ReasoningState, cut_off: bool
) -> None:
    parts = read(text, cuts, at_start, cut_off=cut_off, tools=False, separate=False)
    assert parts == ([Content(text)] if text else [])


@given(TEXTS, CUTS, st.sampled_from(ReasoningState))
def test_an_answer_without_calls_loses_only_tags_and_white_space(
    text: str, cuts: list[int], at_start: ReasoningState
) -> None:
    parts = read(text, cuts, at_start, cut_off=False)
    if any(isinstance(part, ToolCallBegin) for part in parts):
        return
    shown = "".join("".join(part.text.split()) for part in parts if isinstance(part, Content | Reasoning))
    without_space = "".join(text.split())
    tags = ("", "<think>", "</think>")
    assert without_space in {
        opening + shown[:position] + closing + shown[position:]
        for position in range(len(shown) + 1)
        for opening in tags[:2]
        for closing in (tags[0], tags[2])
    }


@given(TEXTS, CUTS, st.booleans())
def test_calls_are_numbered_and_start_before_their_arguments(text: str, cuts: list[int], cut_off: bool) -> None:
    num_calls = 0
    for part in read(text, cuts, ReasoningState.POSSIBLE, cut_off=cut_off):
        if isinstance(part, ToolCallBegin):
            assert (part.number, part.id) == (num_calls, f"id{num_calls}")
            num_calls += 1
        if isinstance(part, ToolCallArguments):
            assert part.number == num_calls - 1
            assert part.text
