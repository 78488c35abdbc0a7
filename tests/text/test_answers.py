"""Answers with tags as parts: fed whole, character by character, and cut at every point."""

from collections.abc import Sequence

import pytest

from motet.text.answers import TaggedFormat, TaggedParser, Thought, Thoughts, Tools
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.reasoning import ReasoningTags, tags_named
from motet.text.tools.base import Reading, Tool, ToolFormat
from tests.text.small_format import call, joined, read_small, small_format, tool, tool_rules

THINK = tags_named("think")


def parser(
    *,
    tags: ReasoningTags | None = THINK,
    at_start: Thought = Thought.MAY_COME,
    separate: bool = True,
    form: ToolFormat | None = None,
    parallel: bool = True,
) -> TaggedParser:
    """For the tools `f` and `go`."""
    rules = tool_rules("f", "go")
    return TaggedFormat.of(
        None if tags is None else Thoughts.of(tags, at_start, separate=separate),
        None if form is None else Tools.of(form, rules.callable, parallel=parallel),
        visible=frozenset(),
    ).parser()


def fed(reader: TaggedParser, pieces: Sequence[str], *, cut: bool = False) -> list[Part]:
    parts = [part for piece in pieces for part in reader.feed(piece, [0])]
    return joined(parts + reader.close(cut=cut))


def thought(text: str, *, at_start: Thought = Thought.MAY_COME, separate: bool = True) -> list[Part]:
    """However it is cut."""
    ways = [[text], list(text), *([text[:place], text[place:]] for place in range(1, len(text)))]
    read = [fed(parser(at_start=at_start, separate=separate), way) for way in ways]
    assert all(one == read[0] for one in read)
    return read[0]


def called(
    text: str,
    *,
    cut: bool = False,
    bare: str | None = None,
    ends: tuple[str, ...] = ("</call>",),
    parallel: bool = True,
) -> list[Part]:
    """However it is cut."""
    ways = [[text], list(text), *([text[:place], text[place:]] for place in range(1, len(text)))]
    read = [fed(parser(form=small_format(bare=bare, ends=ends), parallel=parallel), way, cut=cut) for way in ways]
    assert all(one == read[0] for one in read)
    return read[0]


def test_thoughts_are_told_apart_without_the_white_space_beside_their_tags() -> None:
    assert thought(" \n<think>\n a <b\n\n</think>\n\n c \n d ") == [Reasoning("a <b"), Content("c \n d ")]


def test_thoughts_stand_at_the_beginning_only() -> None:
    for text in ("a<think>b</think>c", "<thin k>", "<", " \n ", "a </think> b", "<<think>a"):
        assert thought(text) == [Content(text)]
    assert thought("<think>a</think>b <think> c </think>") == [Reasoning("a"), Content("b <think> c </think>")]


def test_the_first_closing_tag_ends_them_and_an_opening_tag_within_is_text() -> None:
    assert thought("<think><think>a</think>b</think>") == [Reasoning("<think>a"), Content("b</think>")]


def test_thoughts_that_are_never_closed_are_all_there_is() -> None:
    assert thought("<think>a </thin") == [Reasoning("a </thin")]
    assert thought("<think>") == []
    assert thought("<think></think>") == []


def test_a_thought_may_be_open_from_the_start() -> None:
    assert thought("\n a</think>b", at_start=Thought.OPENED) == [Reasoning("a"), Content("b")]
    assert thought(" a</think>b", at_start=Thought.UNDER_WAY) == [Reasoning(" a"), Content("b")]
    assert thought("<think>a</think>b", at_start=Thought.OPENED) == [Reasoning("<think>a"), Content("b")]
    assert thought(" <think>a</think>", at_start=Thought.OVER) == [Content(" <think>a</think>")]


@pytest.mark.parametrize("at_start", list(Thought))
def test_thoughts_that_shall_not_be_told_apart_are_content_as_they_come(at_start: Thought) -> None:
    for text in (" <think> a </think> b ", "a <think>b", "<think> a </thi", " \n"):
        assert thought(text, at_start=at_start, separate=False) == [Content(text)]


def test_tags_around_what_is_said_are_not_told() -> None:
    hunyuan = tags_named("hunyuan_a13b")
    text = "<think>\na\n</think>\n<answer>\nb <i> c\n</answer>"
    for size in (1, 2, 5, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert fed(parser(tags=hunyuan), pieces) == [Reasoning("a"), Content("b <i> c")]
        assert fed(parser(tags=hunyuan, separate=False), pieces) == [Content(text)]


def test_the_two_ways_in_which_granite_says_it_are_both_read() -> None:
    text = "Here's my thought process: a. Here is my response: b"
    for pieces in ([text], list(text)):
        assert fed(parser(tags=tags_named("granite")), pieces) == [Reasoning("a."), Content("b")]


def test_tokens_of_thoughts_are_counted_to_the_end_of_the_closing_tag() -> None:
    reader = parser()
    counts = []
    for piece in (" ", "<thi", "nk>", "a", "</think", ">b", "c"):
        reader.feed(piece, [0, 1])
        counts.append(reader.reasoning_tokens)
    assert counts == [0, 0, 6, 8, 10, 12, 12]  # those before it is a tag count once it is one


def test_an_answer_without_thoughts_has_no_tokens_of_them() -> None:
    for at_start, text in ((Thought.MAY_COME, "<thi nk>"), (Thought.OVER, "<think>a")):
        reader = parser(at_start=at_start)
        for char in text:
            reader.feed(char, [0])
        assert reader.reasoning_tokens == 0


def test_calls_are_told_with_content_around_them_and_white_space_beside_tags_dropped() -> None:
    text = ' a \n<call>f{"x": 1}</call>\n\n<call>go{} </call> b '
    assert called(text) == [
        Content(" a"),
        *call(0, "f", '{"x": 1}'),
        *call(1, "go", "{}"),
        Content("b "),
    ]


def test_a_call_may_follow_thoughts_and_one_within_them_is_a_thought() -> None:
    assert called("<think>a <call>f{}</call></think>\n<call>f{}</call>") == [
        Reasoning("a <call>f{}</call>"),
        *call(0, "f", "{}"),
    ]


def test_a_call_begins_once_its_arguments_have_and_they_come_as_they_are_written() -> None:
    reader = parser(form=small_format())
    told = [reader.feed(piece, [0]) for piece in ("<call>", "f", "{", '"a', 'b"', ": 1", "}", "</call>")]
    assert told[:3] == [[], [], []]
    assert told[3] == [ToolCallBegin(0, "id0", "f"), ToolCallArguments(0, '{"a')]
    assert "".join(part.text for parts in told[3:] for part in parts if isinstance(part, ToolCallArguments)) == (
        '{"ab": 1}'
    )
    assert reader.called
    assert not any(isinstance(part, Content) for parts in told for part in parts)


def test_what_is_no_call_is_content_with_its_tags() -> None:
    for text in ("a <call>h{}</call> b", "<call></call>", "<call>f</call>", "<call>f[1]</call>", "<call>fo</call> b"):
        assert called(text) == [Content(text)]


def test_a_call_behind_what_was_none_is_read() -> None:
    assert called('Write <call> first. <call>f{"a": 1}</call>') == [
        Content("Write <call> first."),
        *call(0, "f", '{"a": 1}'),
    ]


def test_what_was_told_of_a_call_that_breaks_stays_and_never_becomes_whole() -> None:
    assert called("<call>f{a: [</call> b") == [*call(0, "f", "{a:"), Content("<call>f{a: [</call> b")]


def test_a_call_that_the_model_ended_without_its_closing_tag_is_one() -> None:
    assert called("<call>f{a}") == call(0, "f", "{a}")
    assert called("<call>f{a}</cal", cut=True) == call(0, "f", "{a}")


def test_of_a_call_that_was_cut_off_is_told_what_came() -> None:
    assert called("a <call>f{a", cut=True) == [Content("a"), *call(0, "f", "{a")]
    assert called('<call>f{"a</ca', cut=True) == call(0, "f", '{"a</ca')
    assert called("a <call>f", cut=True) == [Content("a <call>f")]
    assert called("a <cal", cut=True) == [Content("a <cal")]


def test_a_call_that_the_model_itself_did_not_finish_is_none() -> None:
    assert called("<call>f{a") == [*call(0, "f", "{a"), Content("<call>f{a")]


def test_a_closing_tag_in_a_string_closes_nothing() -> None:
    text = '<call>f{"a": "</call>"}</call>b'
    assert called(text) == [*call(0, "f", '{"a": "</call>"}'), Content("b")]
    assert called('<call>f{"a</call> b') == [*call(0, "f", '{"a</call> b'), Content('<call>f{"a</call> b')]


def test_without_parallel_calls_the_first_is_told_and_those_behind_it_are_dropped() -> None:
    assert called("<call>f{}</call> <call>go{}</call> b", parallel=False) == [*call(0, "f", "{}"), Content("b")]
    assert called("<call>f{}</call><call>go{a", parallel=False, cut=True) == call(0, "f", "{}")


def test_a_region_that_nothing_closes_ends_with_the_answer() -> None:
    assert called("a <call>f{}  ", ends=()) == [Content("a"), *call(0, "f", "{}")]


def test_bare_calls_stand_at_the_beginning_or_behind_thoughts() -> None:
    assert called(" go{a}", bare="g") == call(0, "go", "{a}")
    assert called("<think>a</think>\n\ngo{a}", bare="g") == [Reasoning("a"), *call(0, "go", "{a}")]
    for text in (" good", "a go{}", "  ", "g"):
        assert called(text, bare="g") == [Content(text)]


def test_reading_a_long_region_is_linear() -> None:
    lengths: list[int] = []

    def counted(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
        lengths.append(len(text))
        return read_small(text, final, tools)

    long = f'f{{"{"a" * 50_000}"}}'
    form = small_format()
    reader = parser(form=ToolFormat(**{**vars(form), "read": counted}))
    fed(reader, ["<call>", *long, "</call>"])
    assert reader.called
    assert sum(lengths) < 20 * len(long)


def test_many_closing_tags_in_a_string_cost_no_more_than_a_few_readings() -> None:
    lengths: list[int] = []

    def counted(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
        lengths.append(len(text))
        return read_small(text, final, tools)

    form = small_format()
    reader = parser(form=ToolFormat(**{**vars(form), "read": counted}))
    text = '<call>f{"' + "</call>" * 2000
    fed(reader, [text])
    assert sum(lengths) < 60 * len(text)


def test_tools_are_those_of_the_request() -> None:
    seen: list[Sequence[Tool]] = []

    def watched(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
        seen.append(tools)
        return read_small(text, final, tools)

    fed(parser(form=ToolFormat(**{**vars(small_format()), "read": watched})), ["<call>f{}</call>"])
    assert all(list(tools) == [tool("f"), tool("go")] for tools in seen)
