"""The events of a choice, however its tokens are bundled and wherever it is resumed, against the complete text."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from motet.text.choice import ChoiceEvent, TextRules
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, Finish, FinishReason, TokenLogprob
from tests.property.text_oracle import cut, first_stop
from tests.text.feeding import INDEX, LENGTH, STOP, fed, stopping, stream, text_of
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID, build_byte_fallback_tokenizer, build_tiny_tokenizer

BYTE_LEVEL = Tokenizer(build_tiny_tokenizer())
BYTE_FALLBACK = Tokenizer(build_byte_fallback_tokenizer())

TEXTS = st.text(st.one_of(st.sampled_from("ab é日🎼\ufffd"), st.characters(codec="utf-8")), max_size=12)
TOKENS = st.lists(
    st.one_of(
        TEXTS.map(BYTE_LEVEL.encode),
        st.integers(FIRST_BYTE_ID, FIRST_BYTE_ID + 255).map(lambda i: [i]),
        st.sampled_from(["the hello", "and in", "日"]).map(BYTE_LEVEL.encode),
        st.integers(0, 2).map(lambda i: [i]),
    ),
    max_size=8,
).map(lambda parts: tuple(i for part in parts for i in part))
"""Tokens of any text, with invalid characters and special tokens in it."""
STOPS = st.lists(st.text("abe élo日\ufffd", min_size=1, max_size=4), max_size=4).map(tuple)
MAX_LATE = 10
"""Maximum number of output tokens after a stop string: the engine is notified of a stop string within a few steps."""
CUTS = st.lists(st.integers(0, 60), max_size=12)


@st.composite
def rules(draw: st.DrawFn, *, skip: bool = True) -> TextRules:
    return stopping(
        *draw(STOPS),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=skip or draw(st.booleans()),
        min_tokens=draw(st.integers(0, 12)),
        logprobs=draw(st.booleans()),
    )


@dataclass(frozen=True)
class CombinedEvents:
    """All events of a choice, combined."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    offsets: tuple[int, ...]
    end: tuple[FinishReason | None, str | int | None]

    @classmethod
    def of(cls, events: Sequence[ChoiceEvent]) -> "CombinedEvents":
        return cls(
            text_of(events),
            tuple(i for e in events for i in e.token_ids),
            tuple(entry for e in events for entry in e.logprobs or ()),
            tuple(offset for e in events for offset in e.offsets or ()),
            (events[-1].finish, events[-1].stop_reason) if events else (None, None),
        )


@given(TOKENS, STOPS, CUTS, st.booleans(), st.booleans())
def test_the_text_is_the_decoded_text_up_to_the_first_stop_string(
    tokens: tuple[int, ...], stops: tuple[str, ...], cuts: list[int], include: bool, skip: bool
) -> None:
    given_rules = stopping(*stops, include_stop_str_in_output=include, skip_special_tokens=skip)
    answer = CombinedEvents.of(fed(stream(BYTE_LEVEL, given_rules), cut(tokens, cuts) or [()]))
    complete = BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)
    found = first_stop(complete, stops)
    if found is None:
        assert (answer.text, answer.ids, answer.end) == (complete, tokens, (FinishReason.LENGTH, None))
    else:
        expected = complete[: found.end if include else found.start]
        assert (answer.text, answer.end) == (expected, (FinishReason.STOP, found.stop))
        assert answer.ids == tokens[: len(answer.ids)]


@given(TOKENS, rules(skip=False), CUTS, st.sampled_from([LENGTH, STOP]))
def test_streamed_equals_not_streamed(
    tokens: tuple[int, ...], given_rules: TextRules, cuts: list[int], finish: Finish
) -> None:
    tokens = (*tokens, EOS_ID)
    at_once, streamed = stream(BYTE_LEVEL, given_rules), stream(BYTE_LEVEL, given_rules)
    assert CombinedEvents.of(fed(streamed, cut(tokens, cuts), finish)) == CombinedEvents.of(
        fed(at_once, [tokens], finish)
    )
    assert streamed.num_tokens == at_once.num_tokens


@given(TOKENS, rules(skip=False), CUTS)
def test_events_have_every_token_once_and_one_end(
    tokens: tuple[int, ...], given_rules: TextRules, cuts: list[int]
) -> None:
    choice = stream(BYTE_LEVEL, given_rules)
    events = fed(choice, cut(tokens, cuts) or [()])
    answer = CombinedEvents.of(events)
    assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert all(event.text or event.finish for event in events)
    assert answer.ids == tokens[: choice.num_tokens]
    if given_rules.logprobs:
        check_lengths(events)
        assert list(answer.offsets) == sorted(answer.offsets)


@given(TOKENS, st.data(), CUTS, st.booleans())
def test_ids_logprobs_and_offsets_have_equal_lengths_wherever_a_stop_string_cuts(
    tokens: tuple[int, ...], data: st.DataObject, cuts: list[int], include: bool
) -> None:
    """The stop string is a piece of the answer, so it is always found."""
    complete = BYTE_LEVEL.decode(tokens)
    start = data.draw(st.integers(0, max(0, len(complete) - 1)))
    stop = complete[start : start + data.draw(st.integers(1, 4))]
    given_rules = stopping(*[stop] * bool(stop), include_stop_str_in_output=include, logprobs=True)
    check_lengths(fed(stream(BYTE_LEVEL, given_rules), cut(tokens, cuts) or [()]))


def check_lengths(events: Sequence[ChoiceEvent]) -> None:
    for event in events:
        assert event.logprobs is not None and event.offsets is not None
        assert tuple(entry.token_id for entry in event.logprobs) == event.token_ids
        assert len(event.offsets) == len(event.token_ids)


@given(TOKENS, TOKENS, rules(skip=False))
def test_a_resumed_choice_continues_like_the_undisturbed_one(
    before: tuple[int, ...], after: tuple[int, ...], given_rules: TextRules
) -> None:
    undisturbed = stream(BYTE_LEVEL, given_rules)
    first = undisturbed.feed(ChoiceDelta(INDEX, before))
    resumed = stream(BYTE_LEVEL, given_rules, before)
    if first is not None and first.finish is not None:
        assert resumed.ended or len(before) - undisturbed.num_tokens > MAX_LATE
        return
    steps = cut(after, range(len(after))) or [()]
    expected, events = fed(undisturbed, steps), fed(resumed, steps)
    assert [(e.text, e.token_ids, e.finish, e.stop_reason) for e in events] == [
        (e.text, e.token_ids, e.finish, e.stop_reason) for e in expected
    ]
    assert resumed.num_tokens == undisturbed.num_tokens


@given(TEXTS, TEXTS, st.integers(0, 60))
def test_an_answer_continues_its_prompt(prompt: str, answer: str, split: int) -> None:
    """If the prompt ends inside a character, that character belongs to the answer."""
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tuple(tokenizer.encode(prompt + "a" + answer, add_special_tokens=False))
        split %= len(ids)
        text = text_of(fed(stream(tokenizer, prompt=ids[:split]), [ids[split:]]))
        complete, prompt_text = tokenizer.decode(ids), tokenizer.decode(ids[:split])
        assert complete.endswith(text)
        if complete.startswith(prompt_text):
            assert prompt_text + text == complete
        elif tokenizer is BYTE_LEVEL:
            assert prompt_text.removesuffix("\ufffd") + text == complete


@given(TOKENS, TOKENS)
def test_an_answer_to_any_tokens_continues_them(prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    text = text_of(fed(stream(BYTE_LEVEL, prompt=prompt), [answer]))
    complete, prompt_text = BYTE_LEVEL.decode(prompt + answer), BYTE_LEVEL.decode(prompt)
    assert complete in (prompt_text + text, prompt_text.removesuffix("\ufffd") + text)


@given(TEXTS, CUTS)
def test_byte_fallback_text_is_the_same_wherever_it_is_cut(text: str, cuts: list[int]) -> None:
    ids = tuple(BYTE_FALLBACK.encode(text, add_special_tokens=False))
    events = fed(stream(BYTE_FALLBACK, TextRules()), cut(ids, cuts) or [()])
    assert text_of(events) == BYTE_FALLBACK.decode(ids)
