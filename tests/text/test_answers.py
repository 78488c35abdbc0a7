"""Answers with tags become parts: fed in one piece, character by character, and cut at every point."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from motet.text.answers import CallRules, ReasoningRules, ReasoningState, tagged_format
from motet.text.parts import AnswerParser, Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.reasoning import ReasoningTags, tags_named
from motet.text.tools.cursor import Cursor
from motet.text.tools.tool_format import ParsedRegion, Tool, ToolFormat
from tests.text.small_format import call, joined, parse_small, small_format, tool, tool_rules

THINK = tags_named("think")


def parser(
    *,
    tags: ReasoningTags | None = THINK,
    at_start: ReasoningState = ReasoningState.POSSIBLE,
    separate: bool = True,
    form: ToolFormat | None = None,
    parallel: bool = True,
) -> AnswerParser:
    """Returns a parser for answers that can call the tools `f` and `go`."""
    rules = tool_rules("f", "go")
    return tagged_format(
        None if tags is None else ReasoningRules(tags, at_start, separate=separate),
        None if form is None else CallRules(form, rules.callable, parallel=parallel),
    ).parser()


def fed(reader: AnswerParser, pieces: Sequence[str], *, cut: bool = False) -> list[Part]:
    parts = [part for piece in pieces for part in reader.feed(piece, [0])]
    return joined(parts + reader.close(cut=cut))


def cut_anywhere(text: str, new: Callable[[], AnswerParser], *, cut: bool = False) -> list[Part]:
    """Returns the parts of a text, and checks that they are the same wherever it is cut."""
    ways = [[text], list(text), *([text[:place], text[place:]] for place in range(1, len(text)))]
    read = [fed(new(), way, cut=cut) for way in ways]
    assert all(one == read[0] for one in read)
    return read[0]


POSSIBLE, OPENED, STARTED, ENDED = ReasoningState
GRANITE, HUNYUAN = tags_named("granite"), tags_named("hunyuan_a13b")
WITHOUT_REASONING = ("a<think>b</think>c", "<thin k>", "<", " \n ", "a </think> b")
REASONING: list[tuple[ReasoningTags, ReasoningState, str, list[Part]]] = [
    # White space next to tags is dropped.
    (THINK, POSSIBLE, " \n<think>\n a <b\n\n</think>\n\n c \n d ", [Reasoning("a <b"), Content("c \n d ")]),
    # Reasoning is only at the start. The first closing tag ends it, and an opening tag inside is text.
    *[(THINK, POSSIBLE, text, list[Part]([Content(text)])) for text in WITHOUT_REASONING],
    (THINK, POSSIBLE, "<<think>a", [Content("<<think>a")]),
    (THINK, POSSIBLE, "<think>a</think>b <think> c </think>", [Reasoning("a"), Content("b <think> c </think>")]),
    (THINK, POSSIBLE, "<think><think>a</think>b</think>", [Reasoning("<think>a"), Content("b</think>")]),
    # Reasoning that is never closed is the complete answer.
    (THINK, POSSIBLE, "<think>a </thin", [Reasoning("a </thin")]),
    (THINK, POSSIBLE, "<think>", []),
    (THINK, POSSIBLE, "<think></think>", []),
    # The prompt has opened the reasoning, or has closed it.
    (THINK, OPENED, "\n a</think>b", [Reasoning("a"), Content("b")]),
    (THINK, OPENED, "<think>a</think>b", [Reasoning("<think>a"), Content("b")]),
    (THINK, STARTED, " a</think>b", [Reasoning(" a"), Content("b")]),
    (THINK, ENDED, " <think>a</think>", [Content(" <think>a</think>")]),
    # Granite has several opening phrases; Hunyuan's tags around the content are not shown.
    (GRANITE, POSSIBLE, "Here's my thought process: a. Here is my response: b", [Reasoning("a."), Content("b")]),
    (HUNYUAN, POSSIBLE, "<think>\na\n</think>\n<answer>\nb <i> c\n</answer>", [Reasoning("a"), Content("b <i> c")]),
]


@pytest.mark.parametrize(("tags", "at_start", "text", "parts"), REASONING)
def test_reasoning_is_separated(tags: ReasoningTags, at_start: ReasoningState, text: str, parts: list[Part]) -> None:
    assert cut_anywhere(text, lambda: parser(tags=tags, at_start=at_start)) == parts
    assert cut_anywhere(text, lambda: parser(tags=tags, at_start=at_start, separate=False)) == [Content(text)]


def test_reasoning_tokens_are_counted_up_to_the_end_of_the_closing_tag() -> None:
    reader = parser()
    counts = []
    for piece in (" ", "<thi", "nk>", "a", "</think", ">b", "c"):
        reader.feed(piece, [0, 1])
        counts.append(reader.reasoning_tokens)
    assert counts == [0, 0, 6, 8, 10, 12, 12]  # tokens of an opening tag count when the tag is complete


def test_an_answer_without_reasoning_has_no_reasoning_tokens() -> None:
    for at_start, text in ((ReasoningState.POSSIBLE, "<thi nk>"), (ReasoningState.ENDED, "<think>a")):
        reader = parser(at_start=at_start)
        for char in text:
            reader.feed(char, [0])
        assert reader.reasoning_tokens == 0


def test_a_call_is_sent_once_its_arguments_start_which_then_stream() -> None:
    reader = parser(form=small_format())
    sent = [reader.feed(piece, [0]) for piece in ("<call>", "f", "{", '"a', 'b"', ": 1", "}", "</call>")]
    assert sent[:3] == [[], [], []]
    assert sent[3] == [ToolCallBegin(0, "id0", "f"), ToolCallArguments(0, '{"a')]
    assert joined([part for parts in sent for part in parts]) == call(0, "f", '{"ab": 1}')
    assert reader.called


def plain(rules: dict[str, Any], *texts: str) -> list[tuple[dict[str, Any], str, list[Part]]]:
    return [(rules, text, [Content(text)]) for text in texts]


CUT, ONE = {"cut": True}, {"parallel": False}
F, UNENDED, BARE = call(0, "f", "{}"), {"closing_tags": ()}, {"bare": "g"}
CALLS: list[tuple[dict[str, Any], str, list[Part]]] = [
    # White space next to tags is dropped.
    (
        {},
        ' a \n<call>f{"x": 1}</call>\n\n<call>go{} </call> b ',
        [Content(" a"), *call(0, "f", '{"x": 1}'), *call(1, "go", "{}"), Content("b ")],
    ),
    # A call inside reasoning is reasoning.
    ({}, "<think>a <call>f{}</call></think>\n<call>f{}</call>", [Reasoning("a <call>f{}</call>"), *F]),
    # A region that is not a call is content with its tags, and a call after it is parsed.
    *plain({}, "a <call>h{}</call> b", "<call></call>", "<call>f</call>", "<call>f[1]</call>"),
    ({}, "<call>fo</call> b", [Content("<call>fo</call> b")]),
    ({}, "Write <call> first. <call>f{}</call>", [Content("Write <call> first."), *F]),
    # The sent part of a call that becomes invalid, or that the model does not finish, stays.
    ({}, "<call>f{a: [</call> b", [*call(0, "f", "{a:"), Content("<call>f{a: [</call> b")]),
    ({}, "<call>f{a", [*call(0, "f", "{a"), Content("<call>f{a")]),
    # A call that lacks only its closing tag is a call.
    ({}, "<call>f{}", F),
    (CUT, "<call>f{}</cal", F),
    # A call that was cut off is sent as far as it was generated.
    (CUT, "a <call>f{a", [Content("a"), *call(0, "f", "{a")]),
    (CUT, '<call>f{"a</ca', call(0, "f", '{"a</ca')),
    (CUT, "a <call>f", [Content("a <call>f")]),
    (CUT, "a <cal", [Content("a <cal")]),
    # A closing tag in a string closes nothing.
    ({}, '<call>f{"a": "</call>"}</call>b', [*call(0, "f", '{"a": "</call>"}'), Content("b")]),
    ({}, '<call>f{"a</call> b', [*call(0, "f", '{"a</call> b'), Content('<call>f{"a</call> b')]),
    # Without parallel calls, all but the first are dropped.
    (ONE, "<call>f{}</call> <call>go{}</call> b", [*F, Content("b")]),
    (ONE | CUT, "<call>f{}</call><call>go{a", F),
    # A region that nothing closes ends with the answer.
    (UNENDED, "a <call>f{}  ", [Content("a"), *F]),
    # Bare calls are at the start, or after reasoning.
    (BARE, " go{a}", call(0, "go", "{a}")),
    (BARE, "<think>a</think>\n\ngo{a}", [Reasoning("a"), *call(0, "go", "{a}")]),
    *plain(BARE, " good", "a go{}", "  ", "g"),
]


@pytest.mark.parametrize(("given", "text", "parts"), CALLS)
def test_calls_become_parts_with_content_around_them(given: dict[str, Any], text: str, parts: list[Part]) -> None:
    form = {key: given[key] for key in given.keys() & {"bare", "closing_tags"}}
    parallel, cut = given.get("parallel", True), given.get("cut", False)
    assert cut_anywhere(text, lambda: parser(form=small_format(**form), parallel=parallel), cut=cut) == parts


@pytest.mark.parametrize(
    ("pieces", "max_chars"),
    [
        (["<call>", *(long := f'f{{"{"a" * 50_000}"}}'), "</call>"], 20 * len(long)),
        (['<call>f{"' + "</call>" * 2000], 60 * 14_000),
    ],
    ids=["a long region", "closing tags in a string"],
)
def test_parsing_takes_linear_time_and_gets_the_tools_of_the_request(pieces: Sequence[str], max_chars: int) -> None:
    lengths: list[int] = []

    def counted(cursor: Cursor, tools: Sequence[Tool]) -> ParsedRegion:
        lengths.append(len(cursor.text))
        assert list(tools) == [tool("f"), tool("go")]
        return parse_small(cursor, tools)

    reader = parser(form=replace(small_format(), parse=counted))
    fed(reader, pieces)
    assert reader.called == (len(pieces) > 1)
    assert 0 < sum(lengths) < max_chars
