"""One choice from deltas to events: which text is shown, when, with which tokens, and how it ends."""

import pytest
from msgspec.json import encode as json_bytes

from motet.text.choice import ChoiceEvent, TextRules
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, Finish, FinishReason
from tests.text.feeding import INDEX, LENGTH, STOP, events, ids_of, logprob, stopping, stream, text_of
from tests.tiny_tokenizer import EOS_ID, IM_END_ID, build_tiny_tokenizer

A, B = ids_of("a"), ids_of("b")
BOUND = tuple(Tokenizer(build_tiny_tokenizer()).encode("hello and"))
"""The text as three tokens."""
B_STOPS = Finish(FinishReason.STOP, B[0])
SHOWN: dict[str, tuple[TextRules, tuple[int, ...], Finish, list[str], str | int | None]] = {
    "a character arrives when it is complete": (TextRules(), ids_of("aé"), LENGTH, ["a", "é"], None),
    "half a character comes with the end": (TextRules(), ids_of("aé")[:2], LENGTH, ["a", "\ufffd"], None),
    "the end of sequence has no text": (TextRules(), (*A, EOS_ID), STOP, ["a", ""], None),
    "it has none where special tokens are shown either": (
        TextRules(skip_special_tokens=False),
        (*A, EOS_ID),
        STOP,
        ["a", ""],
        None,
    ),
    "a stop token is the reason and has no text": (TextRules(), A + B, B_STOPS, ["a", ""], B[0]),
    "a stop token is kept on request": (TextRules(include_stop_str_in_output=True), A + B, B_STOPS, ["a", "b"], B[0]),
    "special tokens are skipped": (TextRules(), (*A, IM_END_ID, *B), LENGTH, ["a", "b"], None),
    "special tokens are shown on request": (
        TextRules(skip_special_tokens=False),
        (*A, IM_END_ID, *B),
        LENGTH,
        ["a", "<|im_end|>", "b"],
        None,
    ),
    "a stop string is held back": (
        stopping("END"),
        ids_of("1 END"),
        LENGTH,
        ["1", " ", ""],
        "END",
    ),
    "a stop string waits for its character": (
        stopping("日"),
        ids_of("本日"),
        LENGTH,
        ["本", ""],
        "日",
    ),
    "its first two bytes do not stop": (
        stopping("日"),
        ids_of("旦旧"),
        LENGTH,
        ["旦", "旧"],
        None,
    ),
    "a stop string cuts its token": (stopping("ll"), BOUND[:1], LENGTH, ["he"], "ll"),
    "a stop string is kept on request": (
        stopping("ll", include_stop_str_in_output=True),
        BOUND[:1],
        LENGTH,
        ["hell"],
        "ll",
    ),
    "half a stop string comes with the end": (
        stopping("END"),
        (*ids_of("a EN"), EOS_ID),
        STOP,
        ["a", " ", "EN"],
        None,
    ),
    "no stop string ends a choice before min_tokens": (
        stopping("b", min_tokens=3),
        ids_of("abbb"),
        LENGTH,
        ["a", "b", "b", ""],
        "b",
    ),
}
"""Rules, tokens that count, the engine's end, the texts of the events, and the reason that is given."""


@pytest.mark.parametrize("name", SHOWN)
def test_every_token_is_shown_once_with_its_text_up_to_the_end(tokenizer: Tokenizer, name: str) -> None:
    rules, ids, finish, texts, reason = SHOWN[name]
    stopped = isinstance(reason, str)
    choice = stream(tokenizer, rules)
    shown = events(choice, ids, None if stopped else finish)
    assert [event.text for event in shown] == texts
    assert tuple(token_id for event in shown for token_id in event.token_ids) == ids
    end = FinishReason.STOP if stopped else finish.reason
    assert [event.finish for event in shown] == [None] * (len(texts) - 1) + [end]
    assert (shown[-1].stop_reason, choice.num_tokens) == (reason, len(ids))
    assert choice.feed(ChoiceDelta(INDEX, ids_of("e"), None, LENGTH)) is None
    assert choice.num_tokens == len(ids)


def test_an_end_without_a_token_ends_the_choice(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer)
    assert choice.feed(ChoiceDelta(INDEX, (), None, STOP)) == ChoiceEvent(INDEX, "", (), finish=FinishReason.STOP)
    assert choice.num_tokens == 0


def test_a_worker_s_own_reason_is_the_reason_and_keeps_the_last_token(tokenizer: Tokenizer) -> None:
    finish = Finish(FinishReason.STOP, worker_reason="repetition")
    *_, last = events(stream(tokenizer), A + B, finish)
    assert (last.text, last.token_ids, last.finish, last.stop_reason) == ("b", B, FinishReason.STOP, "repetition")
    assert json_bytes(last.stop_reason) == b'"repetition"'


def test_a_stop_string_in_a_delta_ends_it_there_and_wins_over_the_engines_end(tokenizer: Tokenizer) -> None:
    for ids in (ids_of("ab"), ids_of("abcd")):
        choice = stream(tokenizer, stopping("b"))
        event = choice.feed(ChoiceDelta(INDEX, ids, None, LENGTH))
        assert event == ChoiceEvent(INDEX, "a", ids_of("ab"), finish=FinishReason.STOP, stop_reason="b")
        assert choice.num_tokens == 2


def test_log_probabilities_come_with_the_text(tokenizer: Tokenizer) -> None:
    ids = ids_of("aé,b")
    shown = events(stream(tokenizer, stopping(",x", logprobs=True)), ids)
    assert [(e.text, e.token_ids, e.offsets) for e in shown] == [
        ("a", ids[:1], (0,)),
        ("é", ids[1:3], (1, 1)),
        (",b", ids[3:], (2, 3)),
    ]
    assert [e.logprobs for e in shown] == [tuple(map(logprob, e.token_ids)) for e in shown]


def test_tokens_that_a_stop_string_cuts_off_come_with_their_log_probabilities(tokenizer: Tokenizer) -> None:
    """The bug: 11 ids came with 10 log-probabilities. In vLLM the token that completes the stop string has both."""
    hello, a, n, d = tokenizer.encode("hello") + list(ids_of("and"))
    for stop, ids, offsets in (
        ("lo", [hello], [0]),
        ("hello", [hello], [0]),
        ("n", [hello, a, n], [0, 5, 6]),
        ("oan", [hello, a, n], [0, 5, 6]),
    ):
        choice = stream(tokenizer, stopping(stop, logprobs=True))
        shown = events(choice, [hello, a, n, d])
        assert [token_id for event in shown for token_id in event.token_ids] == ids
        assert [entry.token_id for event in shown for entry in event.logprobs or ()] == ids
        assert [offset for event in shown for offset in event.offsets or ()] == offsets


def test_the_end_of_sequence_comes_with_its_log_probability(tokenizer: Tokenizer) -> None:
    ids = [*ids_of("a"), EOS_ID]
    shown = events(stream(tokenizer, TextRules(logprobs=True)), ids, STOP)
    assert (shown[-1].logprobs, shown[-1].offsets) == ((logprob(EOS_ID),), (1,))


def test_a_resumed_choice_completes_a_character_and_a_stop_string(tokenizer: Tokenizer) -> None:
    output, rest = ids_of("the EN本")[:-1], ids_of("the EN本")[-1:]
    choice = stream(tokenizer, stopping("END"), output)
    assert choice.feed(ChoiceDelta(INDEX, rest)) == ChoiceEvent(INDEX, "EN本", ids_of("EN本"))

    choice = stream(tokenizer, stopping("END"), ids_of("the EN"))
    event = choice.feed(ChoiceDelta(INDEX, ids_of("D")))
    assert event == ChoiceEvent(INDEX, "", ids_of("END"), finish=FinishReason.STOP, stop_reason="END")


@pytest.mark.parametrize(
    ("stop", "before", "partial", "last"),
    [("日" * 60, "a" * 400, ids_of("日" * 59), "日"), ("END", "a" * 50, (*ids_of("EN"), *[IM_END_ID] * 200), "D")],
    ids=["a long one", "special tokens without text in it"],
)
def test_a_stop_string_that_started_long_before_is_completed(
    tokenizer: Tokenizer, stop: str, before: str, partial: tuple[int, ...], last: str
) -> None:
    choice = stream(tokenizer, stopping(stop), ids_of(before) + partial)
    shown = events(choice, ids_of(last + "!"))
    assert [(e.text, e.token_ids, e.stop_reason) for e in shown] == [("", (*partial, *ids_of(last)), stop)]


def test_a_resumed_choice_counts_its_output_tokens(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer, stopping("b", min_tokens=101), ids_of("a" * 100))
    assert choice.num_tokens == 100
    shown = events(choice, ids_of("bab"))
    assert (text_of(shown), choice.num_tokens) == ("ba", 103)


def test_offsets_of_a_resumed_choice_count_from_the_start(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer, TextRules(logprobs=True), ids_of("é" * 50))
    (event,) = events(choice, ids_of("a"))
    assert event.offsets == (50,)


def test_a_choice_whose_output_tokens_contain_a_stop_string_has_ended(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer, stopping("b"), ids_of("abc"))
    assert (choice.finish, choice.num_tokens) == (FinishReason.STOP, 2)
    assert choice.feed(ChoiceDelta(INDEX, ids_of("d"), None, LENGTH)) is None


def test_resuming_reads_only_the_last_output_tokens(tokenizer: Tokenizer) -> None:
    """Reading thousands of output tokens would block the event loop, so an early stop string is not found."""
    assert not stream(tokenizer, stopping("b"), ids_of("b" + "a" * 4000)).ended
