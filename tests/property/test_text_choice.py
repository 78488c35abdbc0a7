"""The events of a choice, however its tokens are bundled and wherever it is resumed, against the whole text at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, ChoiceStart, Finish, FinishReason, TokenLogprob
from tests.property.text_oracle import cut, first_stop
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
"""Any text, broken characters and special tokens among it."""
STOPS = st.lists(st.text("abe élo日\ufffd", min_size=1, max_size=4), max_size=4).map(tuple)
FAR = 10
"""An engine is told of a stop string within a few steps; written tokens never go on for longer behind one."""
CUTS = st.lists(st.integers(0, 60), max_size=12)


@st.composite
def rules(draw: st.DrawFn, *, skip: bool = True) -> TextRules:
    return TextRules(
        stop=draw(STOPS),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=skip or draw(st.booleans()),
        min_tokens=draw(st.integers(0, 12)),
        logprobs=draw(st.booleans()),
    )


def run(choice: ChoiceStream, pieces: Sequence[tuple[int, ...]], finish: Finish) -> list[ChoiceEvent]:
    """The events of tokens that come in these pieces; the last ends the choice."""
    events = []
    for number, ids in enumerate(pieces, 1):
        logprobs = tuple(TokenLogprob(i, -1.0, 1) for i in ids)
        event = choice.feed(ChoiceDelta(0, ids, logprobs, finish if number == len(pieces) else None))
        events += [] if event is None else [event]
    return events


def fresh(tokenizer: Tokenizer, given: TextRules, *, written: tuple[int, ...] = ()) -> ChoiceStream:
    return ChoiceStream(ChoiceStart(0, 0, written), (), tokenizer=tokenizer, rules=given, stops=given.stop_strings())


def text_of(events: Sequence[ChoiceEvent]) -> str:
    return "".join(event.text for event in events)


@dataclass(frozen=True)
class Answer:
    """What all events of a choice come to."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    offsets: tuple[int, ...]
    end: tuple[FinishReason | None, str | int | None]

    @classmethod
    def of(cls, events: Sequence[ChoiceEvent]) -> "Answer":
        return cls(
            text_of(events),
            tuple(i for e in events for i in e.token_ids),
            tuple(entry for e in events for entry in e.logprobs or ()),
            tuple(offset for e in events for offset in e.offsets or ()),
            (events[-1].finish, events[-1].stop_reason) if events else (None, None),
        )


LENGTH = Finish(FinishReason.LENGTH)


@given(TOKENS, STOPS, CUTS, st.booleans(), st.booleans())
def test_the_text_is_the_decoded_whole_up_to_its_first_stop_string(
    tokens: tuple[int, ...], stops: tuple[str, ...], cuts: list[int], include: bool, skip: bool
) -> None:
    given_rules = TextRules(stop=stops, include_stop_str_in_output=include, skip_special_tokens=skip)
    answer = Answer.of(run(fresh(BYTE_LEVEL, given_rules), cut(tokens, cuts) or [()], LENGTH))
    whole = BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)
    found = first_stop(whole, stops)
    if found is None:
        assert (answer.text, answer.ids, answer.end) == (whole, tokens, (FinishReason.LENGTH, None))
    else:
        expected = whole[: found.end if include else found.start]
        assert (answer.text, answer.end) == (expected, (FinishReason.STOP, found.stop))
        assert answer.ids == tokens[: len(answer.ids)]


@given(TOKENS, rules(skip=False), CUTS, st.sampled_from([LENGTH, Finish(FinishReason.STOP)]))
def test_streamed_is_not_streamed(
    tokens: tuple[int, ...], given_rules: TextRules, cuts: list[int], finish: Finish
) -> None:
    tokens = (*tokens, EOS_ID)
    whole, streamed = fresh(BYTE_LEVEL, given_rules), fresh(BYTE_LEVEL, given_rules)
    assert Answer.of(run(streamed, cut(tokens, cuts), finish)) == Answer.of(run(whole, [tokens], finish))
    assert streamed.num_tokens == whole.num_tokens


@given(TOKENS, rules(skip=False), CUTS)
def test_events_tell_every_token_once_and_one_end(
    tokens: tuple[int, ...], given_rules: TextRules, cuts: list[int]
) -> None:
    choice = fresh(BYTE_LEVEL, given_rules)
    events = run(choice, cut(tokens, cuts) or [()], LENGTH)
    answer = Answer.of(events)
    assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert all(event.text or event.finish for event in events)
    assert answer.ids == tokens[: choice.num_tokens]
    if given_rules.logprobs:
        assert tuple(entry.token_id for entry in answer.logprobs) == tokens[: len(answer.logprobs)]
        assert list(answer.offsets) == sorted(answer.offsets)
        assert answer.end[1] is not None or len(answer.logprobs) == len(tokens)


@given(TOKENS, TOKENS, rules(skip=False))
def test_a_resumed_choice_goes_on_as_the_undisturbed_one(
    before: tuple[int, ...], after: tuple[int, ...], given_rules: TextRules
) -> None:
    undisturbed = fresh(BYTE_LEVEL, given_rules)
    first = undisturbed.feed(ChoiceDelta(0, before))
    resumed = fresh(BYTE_LEVEL, given_rules, written=before)
    if first is not None and first.finish is not None:
        assert resumed.ended or len(before) - undisturbed.num_tokens > FAR
        return
    steps = cut(after, range(len(after))) or [()]
    expected, events = run(undisturbed, steps, LENGTH), run(resumed, steps, LENGTH)
    assert [(e.text, e.token_ids, e.finish, e.stop_reason) for e in events] == [
        (e.text, e.token_ids, e.finish, e.stop_reason) for e in expected
    ]
    assert resumed.num_tokens == undisturbed.num_tokens


@given(TEXTS, TEXTS, st.integers(0, 60))
def test_an_answer_continues_its_prompt(prompt: str, answer: str, place: int) -> None:
    """Also where the prompt ends inside a character; such a character is the answer's."""
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tuple(tokenizer.encode(prompt + "a" + answer, add_special_tokens=False))
        place %= len(ids)
        choice = ChoiceStream(ChoiceStart(0, 0), ids[:place], tokenizer=tokenizer, rules=TextRules(), stops=None)
        text = text_of(run(choice, [ids[place:]], LENGTH))
        whole, known = tokenizer.decode(ids), tokenizer.decode(ids[:place])
        assert whole.endswith(text)
        if whole.startswith(known):
            assert known + text == whole
        elif tokenizer is BYTE_LEVEL:
            assert known.removesuffix("\ufffd") + text == whole


@given(TOKENS, TOKENS)
def test_an_answer_to_any_tokens_continues_them(prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    choice = ChoiceStream(ChoiceStart(0, 0), prompt, tokenizer=BYTE_LEVEL, rules=TextRules(), stops=None)
    text = text_of(run(choice, [answer], LENGTH))
    whole, known = BYTE_LEVEL.decode(prompt + answer), BYTE_LEVEL.decode(prompt)
    assert whole in (known + text, known.removesuffix("\ufffd") + text)


@given(TEXTS, CUTS)
def test_byte_fallback_text_survives_any_cutting(text: str, cuts: list[int]) -> None:
    ids = tuple(BYTE_FALLBACK.encode(text, add_special_tokens=False))
    events = run(fresh(BYTE_FALLBACK, TextRules()), cut(ids, cuts) or [()], LENGTH)
    assert text_of(events) == BYTE_FALLBACK.decode(ids)
