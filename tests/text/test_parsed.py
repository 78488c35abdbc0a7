"""A choice whose text is read as parts, from deltas to events, and groups of such choices."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from tokenizers import AddedToken

from motet.errors import AnswerParserError
from motet.testing.fake_engine import FakeEngine
from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules
from motet.text.formats import ModelFormats
from motet.text.parts import AnswerFormat, Content, Part, Reasoning
from motet.text.reasoning import tags_named
from motet.text.text_group import TextGroup
from motet.text.tokenizer import Tokenizer
from motet.text.tools.cursor import Cursor
from motet.text.tools.tool_format import ParsedRegion, ToolFormat
from motet.types import ChoiceDelta, FinishReason
from tests.text.feeding import INDEX, LENGTH, STOP, events, first_of, ids_of, request, stopping, stream, text_of
from tests.text.small_format import call, joined, small_format, tool_rules
from tests.text.test_text_group import rest_of
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID, build_tiny_tokenizer, fake_answer


def answer_format(tokenizer: Tokenizer, *, form: ToolFormat | None = None) -> AnswerFormat:
    formats = ModelFormats(tokenizer=tokenizer, reasoning=tags_named("think"), tools=form or small_format())
    made = formats.for_request((FIRST_BYTE_ID,), tools=tool_rules("f", "go"))
    assert made is not None
    return made


def parsed(tokenizer: Tokenizer, rules: TextRules | None = None, output: tuple[int, ...] = ()) -> ChoiceStream:
    rules = msgspec.structs.replace(rules or TextRules(), format=answer_format(tokenizer))
    return stream(tokenizer, rules, output)


def parts_of(shown: Sequence[ChoiceEvent]) -> list[Part]:
    return joined([part for event in shown for part in event.parts or ()])


ANSWER = '<think> é🎼 </think>\n\nso <call>f{"a": 1}</call><call>go{}</call>'
PARTS = [Reasoning("é🎼"), Content("so"), *call(0, "f", '{"a": 1}'), *call(1, "go", "{}")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_parts_tokens_and_text_do_not_depend_on_how_the_engine_bundles_tokens(tokenizer: Tokenizer, size: int) -> None:
    choice = parsed(tokenizer, TextRules(logprobs=True))
    ids = (*ids_of(ANSWER), EOS_ID)
    shown = events(choice, ids, STOP, size=size)
    assert parts_of(shown) == PARTS
    assert text_of(shown) == ANSWER
    assert tuple(i for event in shown for i in event.token_ids) == ids
    assert [entry.token_id for event in shown for entry in event.logprobs or ()] == list(ids)
    starts = [*range(9), 8]  # "é" is two tokens
    assert [offset for event in shown for offset in event.offsets or ()][:10] == starts
    assert (shown[-1].finish, choice.num_tokens) == (FinishReason.TOOL_CALLS, len(ids))
    assert choice.reasoning_tokens == len("<think> é🎼 </think>".encode())


def test_a_choice_that_is_cut_off_in_a_call_does_not_finish_with_tool_calls(tokenizer: Tokenizer) -> None:
    shown = events(parsed(tokenizer), ids_of('<call>f{"a'), LENGTH)
    assert (parts_of(shown), shown[-1].finish) == (call(0, "f", '{"a'), FinishReason.LENGTH)


def test_an_end_without_a_token_shows_the_text_that_was_held_back(tokenizer: Tokenizer) -> None:
    choice = parsed(tokenizer)
    events(choice, ids_of("a <cal"), None)
    last = choice.feed(ChoiceDelta(INDEX, (), None, STOP))
    assert last is not None
    assert (last.parts, last.finish, last.token_ids) == ((Content(" <cal"),), FinishReason.STOP, ())
    assert choice.feed(ChoiceDelta(INDEX, ids_of("b"))) is None


def test_a_stop_string_ends_a_thought_or_a_call_where_it_occurs(tokenizer: Tokenizer) -> None:
    stop = stopping("X")
    shown = events(parsed(tokenizer, stop), ids_of("<think>a bXc</think>"), STOP, size=3)
    assert (parts_of(shown), shown[-1].finish, shown[-1].stop_reason) == ([Reasoning("a b")], FinishReason.STOP, "X")
    shown = events(parsed(tokenizer, stop), ids_of('<call>f{"aXb"}</call>'), STOP, size=3)
    assert (parts_of(shown), shown[-1].finish) == (call(0, "f", '{"a'), FinishReason.STOP), "the call is not complete"


def test_a_stop_string_can_be_a_tag_and_is_kept_on_request(tokenizer: Tokenizer) -> None:
    for keep in (False, True):
        rules = stopping("</call>", include_stop_str_in_output=keep)
        shown = events(parsed(tokenizer, rules), ids_of("<call>f{}</call><call>go{}</call>"), STOP, size=2)
        assert (parts_of(shown), shown[-1].finish) == (call(0, "f", "{}"), FinishReason.TOOL_CALLS)
        assert text_of(shown).endswith("</call>") is keep


@pytest.mark.parametrize("place", range(0, len(ids_of(ANSWER)), 3))
def test_a_resumed_choice_continues_wherever_it_was_cut(tokenizer: Tokenizer, place: int) -> None:
    ids = ids_of(ANSWER)
    undisturbed, resumed = parsed(tokenizer), parsed(tokenizer, output=ids[:place])
    before = parts_of(events(undisturbed, ids[:place], None))
    after = [events(choice, (*ids[place:], EOS_ID), STOP, size=2) for choice in (undisturbed, resumed)]
    assert parts_of(after[0]) == parts_of(after[1])
    assert joined([*before, *parts_of(after[1])]) == PARTS
    assert undisturbed.reasoning_tokens == resumed.reasoning_tokens
    assert undisturbed.num_tokens == resumed.num_tokens


@pytest.mark.parametrize("skip", [True, False])
def test_tags_that_are_special_tokens_are_read(skip: bool) -> None:
    backend = build_tiny_tokenizer()
    tags = ["<think>", "</think>", "<call>", "</call>"]
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("<think>é</think> so <call>f{}</call>")
    assert tokenizer.special_ids & set(ids) == {backend.token_to_id(tag) for tag in tags}
    choice = parsed(tokenizer, TextRules(skip_special_tokens=skip, logprobs=True))
    shown = events(choice, (*ids, EOS_ID), STOP)
    assert parts_of(shown) == [Reasoning("é"), Content("so"), *call(0, "f", "{}")]
    assert choice.reasoning_tokens == 4  # two tags and the two bytes between them
    offsets = [offset for event in shown for offset in event.offsets or ()]
    assert offsets[:5] == [0, 7, 7, 8, 16]


class FailingParser:
    reasoning_tokens = 0
    called = False

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        self._left -= 1
        if not self._left:
            raise KeyError("name")
        return [Content(text)]

    def close(self, *, cut: bool) -> list[Part]:
        return []


@pytest.mark.anyio
async def test_a_parser_that_fails_ends_its_group_and_no_other(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(lambda _, start: fake_answer("abcdef"))
    parsers = map(FailingParser, (1000, 3, 1000))  # the second choice's fails at its third token
    form = AnswerFormat(lambda: next(parsers), frozenset())
    failing = TextGroup(engine, request(3, "one"), tokenizer=tokenizer, rules=TextRules(format=form))
    other = TextGroup(engine, request(3, "two"), tokenizer=tokenizer, rules=TextRules(format=answer_format(tokenizer)))
    await first_of(failing)
    await first_of(failing)
    with pytest.raises(AnswerParserError, match=r"the answer of choice 1 could not be read: KeyError\('name'\)"):
        await first_of(failing)
    assert "Traceback" in caplog.text and "KeyError: 'name'" in caplog.text
    assert engine.open.keys() == {"two"}
    steps = await rest_of(other)
    assert [parts_of([e for s in steps for e in s.events if e.index == i]) for i in range(3)] == [
        [Content("abcdef")]
    ] * 3
    engine.check()


@pytest.mark.anyio
async def test_choices_of_one_group_are_read_as_if_each_were_alone(tokenizer: Tokenizer) -> None:
    answers = [
        ANSWER,
        "<think>never closed <call>f{}</call>",
        "a <call>h{} b",
        "<call>f{a: [",
        '<call>f{"</call>"}</call> b',
        "plain",
        "",
        "<call>go{}</call>",
    ]

    form = replace(small_format(), new_call_id=lambda: "id")  # the same ids whatever other choices do

    async def read(indices: Sequence[int]) -> tuple[list[tuple[list[Part], FinishReason | None]], int | None]:
        engine = FakeEngine(lambda _, start: fake_answer(answers[indices[start.index]]))
        group = TextGroup(
            engine,
            request(len(indices)),
            tokenizer=tokenizer,
            rules=TextRules(format=answer_format(tokenizer, form=form)),
        )
        shown = [event for step in await rest_of(group) for event in step.events]
        mine = [[event for event in shown if event.index == i] for i in range(len(indices))]
        return [(parts_of(one), one[-1].finish) for one in mine], group.usage.reasoning_tokens

    together, reasoning_tokens = await read(range(len(answers)))
    singly = [await read([index]) for index in range(len(answers))]
    assert together == [choices[0] for choices, _ in singly]
    assert reasoning_tokens == sum(tokens or 0 for _, tokens in singly)
    assert [finish for _, finish in together].count(FinishReason.TOOL_CALLS) == 3


def test_the_error_of_a_format_that_raises_names_the_choice(tokenizer: Tokenizer) -> None:
    def fails(cursor: Cursor, tools: object) -> ParsedRegion:
        raise RecursionError("too deep")

    rules = TextRules(format=answer_format(tokenizer, form=replace(small_format(), parse=fails)))
    with pytest.raises(AnswerParserError, match=r"choice 2 .*too deep"):
        events(stream(tokenizer, rules), ids_of("<call>f{ab}"))
