"""One choice from deltas to events: what is shown, when, with which tokens, and how it ends."""

from collections.abc import Sequence

from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, ChoiceStart, Finish, FinishReason, TokenLogprob
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID, IM_END_ID

LENGTH = Finish(FinishReason.LENGTH)
EOS = Finish(FinishReason.STOP)


def stream(tokenizer: Tokenizer, rules: TextRules | None = None, written: tuple[int, ...] = ()) -> ChoiceStream:
    rules = rules or TextRules()
    return ChoiceStream(ChoiceStart(2, 7, written), (), tokenizer=tokenizer, rules=rules, stops=rules.stop_strings())


def ids_of(text: str) -> tuple[int, ...]:
    """One token a byte, whatever the merges."""
    return tuple(FIRST_BYTE_ID + byte for byte in text.encode())


def deltas(ids: Sequence[int], finish: Finish | None = LENGTH, *, logprobs: bool = False) -> list[ChoiceDelta]:
    """One a token, the last with `finish`."""
    return [
        ChoiceDelta(2, (i,), (logprob(i),) if logprobs else None, finish if n == len(ids) - 1 else None)
        for n, i in enumerate(ids)
    ]


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -token_id / 100, 1)


def events(choice: ChoiceStream, steps: Sequence[ChoiceDelta]) -> list[ChoiceEvent]:
    return [event for step in steps if (event := choice.feed(step)) is not None]


def text_of(shown: Sequence[ChoiceEvent]) -> str:
    return "".join(event.text for event in shown)


def test_each_token_is_shown_when_its_text_is_whole(tokenizer: Tokenizer) -> None:
    ids = ids_of("aé")
    assert events(stream(tokenizer), deltas(ids)) == [
        ChoiceEvent(2, "a", ids[:1]),
        ChoiceEvent(2, "é", ids[1:], finish=FinishReason.LENGTH),
    ]


def test_what_is_held_is_shown_when_the_choice_ends(tokenizer: Tokenizer) -> None:
    ids = ids_of("aé")[:2]
    assert events(stream(tokenizer), deltas(ids))[-1] == ChoiceEvent(2, "\ufffd", ids[1:], finish=FinishReason.LENGTH)


def test_the_end_of_sequence_token_has_no_text_but_is_told(tokenizer: Tokenizer) -> None:
    for rules in (TextRules(), TextRules(skip_special_tokens=False)):
        last = events(stream(tokenizer, rules), deltas([*ids_of("a"), EOS_ID], EOS))[-1]
        assert last == ChoiceEvent(2, "", (EOS_ID,), finish=FinishReason.STOP)


def test_a_stop_token_is_the_stop_reason_and_has_no_text(tokenizer: Tokenizer) -> None:
    (stop,) = ids_of("b")
    steps = deltas([*ids_of("a"), stop], Finish(FinishReason.STOP, stop))
    assert events(stream(tokenizer), steps)[-1] == ChoiceEvent(2, "", (stop,), None, None, FinishReason.STOP, stop)


def test_the_text_of_a_stop_token_is_kept_on_request(tokenizer: Tokenizer) -> None:
    (stop,) = ids_of("b")
    rules = TextRules(include_stop_str_in_output=True)
    shown = events(stream(tokenizer, rules), deltas([*ids_of("a"), stop], Finish(FinishReason.STOP, stop)))
    assert (text_of(shown), shown[-1].stop_reason) == ("ab", stop)


def test_an_end_without_a_token_ends_the_choice(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer)
    assert choice.feed(ChoiceDelta(2, (), None, EOS)) == ChoiceEvent(2, "", (), finish=FinishReason.STOP)
    assert choice.num_tokens == 0


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    ids = [*ids_of("a"), IM_END_ID, *ids_of("b")]
    assert text_of(events(stream(tokenizer), deltas(ids))) == "ab"
    rules = TextRules(skip_special_tokens=False)
    assert text_of(events(stream(tokenizer, rules), deltas(ids))) == "a<|im_end|>b"


def test_a_stop_string_across_a_token_border_is_held_back(tokenizer: Tokenizer) -> None:
    ids = ids_of("one END")
    shown = events(stream(tokenizer, TextRules(stop=("END",))), deltas(ids))
    assert [event.text for event in shown] == ["o", "n", "e", " ", ""]
    assert shown[-1] == ChoiceEvent(2, "", ids[4:], finish=FinishReason.STOP, stop_reason="END")


def test_a_stop_string_inside_a_multi_byte_character_waits_for_the_character(tokenizer: Tokenizer) -> None:
    shown = events(stream(tokenizer, TextRules(stop=("日",))), deltas(ids_of("本日本")))
    assert (text_of(shown), shown[-1].stop_reason) == ("本", "日")
    shown = events(stream(tokenizer, TextRules(stop=("日",))), deltas(ids_of("旦旧")))  # the same first two bytes
    assert (text_of(shown), shown[-1].stop_reason) == ("旦旧", None)


def test_a_stop_string_in_the_middle_of_a_token_cuts_the_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello and")
    assert len(ids) == 3
    shown = events(stream(tokenizer, TextRules(stop=("ll",))), deltas(ids))
    assert shown == [ChoiceEvent(2, "he", tuple(ids[:1]), finish=FinishReason.STOP, stop_reason="ll")]


def test_the_stop_string_is_kept_on_request_but_nothing_behind_it(tokenizer: Tokenizer) -> None:
    rules = TextRules(stop=("ll",), include_stop_str_in_output=True)
    shown = events(stream(tokenizer, rules), deltas(tokenizer.encode("hello and")))
    assert (text_of(shown), shown[-1].stop_reason) == ("hell", "ll")


def test_what_was_held_for_a_stop_string_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    ids = [*ids_of("the EN"), EOS_ID]
    shown = events(stream(tokenizer, TextRules(stop=("END",))), deltas(ids, EOS))
    assert shown[-1] == ChoiceEvent(2, "EN", tuple(ids[-3:]), finish=FinishReason.STOP)


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop(tokenizer: Tokenizer) -> None:
    shown = events(stream(tokenizer, TextRules(stop=("b",))), deltas(ids_of("ab")))
    assert (shown[-1].finish, shown[-1].stop_reason) == (FinishReason.STOP, "b")


def test_a_stop_string_does_not_end_a_choice_before_min_tokens(tokenizer: Tokenizer) -> None:
    rules = TextRules(stop=("b",), min_tokens=3)
    assert text_of(events(stream(tokenizer, rules), deltas(ids_of("abbba")))) == "abb"


def test_nothing_comes_after_the_end(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer, TextRules(stop=("b",)))
    shown = events(choice, deltas(ids_of("abcd")))
    assert [event.finish for event in shown] == [None, FinishReason.STOP]
    assert choice.feed(ChoiceDelta(2, ids_of("e"), None, LENGTH)) is None
    assert choice.num_tokens == 2


def test_tokens_behind_a_stop_string_in_the_same_delta_are_not_counted(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer, TextRules(stop=("b",)))
    event = choice.feed(ChoiceDelta(2, ids_of("abcd"), None, LENGTH))
    assert event == ChoiceEvent(2, "a", ids_of("ab"), finish=FinishReason.STOP, stop_reason="b")
    assert choice.num_tokens == 2


def test_log_probabilities_come_with_the_text(tokenizer: Tokenizer) -> None:
    ids = ids_of("aé,b")
    shown = events(stream(tokenizer, TextRules(stop=(",x",), logprobs=True)), deltas(ids, logprobs=True))
    assert [(e.text, e.token_ids, e.offsets) for e in shown] == [
        ("a", ids[:1], (0,)),
        ("é", ids[1:3], (1, 1)),
        (",b", ids[3:], (2, 3)),
    ]
    assert [e.logprobs for e in shown] == [tuple(map(logprob, e.token_ids)) for e in shown]


def test_log_probabilities_of_tokens_that_a_stop_string_cut_off_are_dropped(tokenizer: Tokenizer) -> None:
    hello, a, n, d = tokenizer.encode("hello") + list(ids_of("and"))
    for stop, kept in (("lo", [hello]), ("hello", []), ("n", [hello, a])):
        choice = stream(tokenizer, TextRules(stop=(stop,), logprobs=True))
        shown = events(choice, deltas([hello, a, n, d], logprobs=True))
        assert [entry.token_id for event in shown for entry in event.logprobs or ()] == kept


def test_the_log_probability_of_the_end_of_sequence_is_told(tokenizer: Tokenizer) -> None:
    ids = [*ids_of("a"), EOS_ID]
    shown = events(stream(tokenizer, TextRules(logprobs=True)), deltas(ids, EOS, logprobs=True))
    assert (shown[-1].logprobs, shown[-1].offsets) == ((logprob(EOS_ID),), (1,))


def test_a_resumed_choice_completes_a_character_and_a_stop_string_begun_before(tokenizer: Tokenizer) -> None:
    written, rest = ids_of("the EN本")[:-1], ids_of("the EN本")[-1:]
    choice = stream(tokenizer, TextRules(stop=("END",)), written)
    assert choice.feed(ChoiceDelta(2, rest)) == ChoiceEvent(2, "EN本", ids_of("EN本"))

    choice = stream(tokenizer, TextRules(stop=("END",)), ids_of("the EN"))
    event = choice.feed(ChoiceDelta(2, ids_of("D")))
    assert event == ChoiceEvent(2, "", ids_of("END"), finish=FinishReason.STOP, stop_reason="END")


def test_a_long_stop_string_begun_before_is_completed(tokenizer: Tokenizer) -> None:
    stop = "日" * 60
    choice = stream(tokenizer, TextRules(stop=(stop,)), ids_of("a" * 400 + "日" * 59))
    shown = events(choice, deltas(ids_of("日!")))
    assert [(e.text, e.token_ids, e.stop_reason) for e in shown] == [("", ids_of(stop), stop)]


def test_a_stop_string_goes_on_behind_special_tokens_that_have_no_text(tokenizer: Tokenizer) -> None:
    ids = (*ids_of("EN"), *[IM_END_ID] * 200)
    choice = stream(tokenizer, TextRules(stop=("END",)), ids_of("a" * 50) + ids)
    shown = events(choice, deltas(ids_of("D!")))
    assert [(e.text, e.token_ids, e.stop_reason) for e in shown] == [("", (*ids, *ids_of("D")), "END")]


def test_a_resumed_choice_counts_its_written_tokens(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer, TextRules(stop=("b",), min_tokens=101), ids_of("a" * 100))
    assert choice.num_tokens == 100
    shown = events(choice, deltas(ids_of("bab")))
    assert (text_of(shown), choice.num_tokens) == ("ba", 103)


def test_offsets_of_a_resumed_choice_count_from_the_beginning(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer, TextRules(logprobs=True), ids_of("é" * 50))
    (event,) = events(choice, deltas(ids_of("a"), logprobs=True))
    assert event.offsets == (50,)


def test_a_choice_whose_written_tokens_hold_a_stop_string_has_ended(tokenizer: Tokenizer) -> None:
    choice = stream(tokenizer, TextRules(stop=("b",)), ids_of("abc"))
    assert (choice.finish, choice.num_tokens) == (FinishReason.STOP, 2)
    assert choice.feed(ChoiceDelta(2, ids_of("d"), None, LENGTH)) is None


def test_resuming_reads_only_the_end_of_what_was_written(tokenizer: Tokenizer) -> None:
    """Thousands of written tokens would hold up the event loop, so a stop string far back goes unseen."""
    assert not stream(tokenizer, TextRules(stop=("b",)), ids_of("b" + "a" * 4000)).ended
