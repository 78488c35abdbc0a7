"""Matchers allow exactly the tokens of their grammar; grammars are cached; reasoning can precede them."""

import pytest

from motet.errors import GrammarError
from motet.text.harmony import HARMONY_THINKING
from motet.types import ANY_ANSWER, Grammar, GrammarKind, Thinking, ThinkingBudget
from tests.grammar.models import TOKENIZER, VOCAB_SIZE, allowed, allowed_texts, follows, grammars_of, json, lark, regex
from tests.tiny_tokenizer import EOS_ID, IM_END, IM_END_ID, IM_START, IM_START_ID

YES = TOKENIZER.encode("y")[0]


def test_only_allowed_tokens_can_come_and_then_the_end_of_sequence() -> None:
    matcher = grammars_of().get(regex("[xy]z?")).matcher()
    assert allowed_texts(matcher) == {"x", "y"}
    assert not matcher.inner.is_accepting()
    matcher.consume(YES)
    assert (matcher.inner.is_accepting(), matcher.stopped) == (True, False)
    assert allowed_texts(matcher) == {"z", "<|eos|>"}
    matcher.consume(TOKENIZER.encode("z")[0])
    assert matcher.stopped
    assert allowed(matcher) == [EOS_ID]


def test_every_end_of_sequence_token_can_end_an_answer() -> None:
    matcher = grammars_of(eos_token_ids=(EOS_ID, IM_END_ID)).get(regex("y")).matcher()
    matcher.consume(YES)
    assert allowed(matcher) == [EOS_ID, IM_END_ID]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 288, 300])
def test_without_an_end_of_sequence_a_finished_matcher_is_stopped_and_allows_nothing(vocab_size: int) -> None:
    matcher = grammars_of(vocab_size=vocab_size, eos_token_ids=()).get(regex("y")).matcher()
    assert allowed(matcher, vocab_size) == [YES]
    matcher.consume(YES)
    assert matcher.stopped and allowed(matcher, vocab_size) == []


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 50, VOCAB_SIZE - 5])
def test_ids_beyond_the_vocabulary_of_the_tokenizer_or_the_model_are_never_allowed(vocab_size: int) -> None:
    matcher = grammars_of(vocab_size=vocab_size).get(regex("(?s:.*)")).matcher()
    assert max(allowed(matcher, max(vocab_size, VOCAB_SIZE))) < min(vocab_size, VOCAB_SIZE)


def test_special_tokens_do_not_match_as_text() -> None:
    matcher = grammars_of().get(regex(r"(?s:.*)")).matcher()
    assert IM_START_ID not in allowed(matcher)


@pytest.mark.parametrize(
    ("grammar", "before"),
    [(regex(f"a{IM_END}b".replace("|", r"\|")), "a"), (Grammar(GrammarKind.CHOICE, f'["{IM_END}"]'), "")],
)
def test_the_text_of_a_special_token_in_a_grammar_is_generated_as_plain_text(grammar: Grammar, before: str) -> None:
    matcher = grammars_of().get(grammar).matcher(TOKENIZER.encode(before) if before else ())
    assert "<" in allowed_texts(matcher)
    assert not {IM_END, IM_START} & allowed_texts(matcher)


def test_a_matcher_continues_after_output_tokens() -> None:
    compiled = grammars_of().get(json('{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'))
    undisturbed = compiled.matcher()
    for token in TOKENIZER.encode('{"a": 1'):
        undisturbed.consume(token)
    assert allowed(compiled.matcher(TOKENIZER.encode('{"a": 1'))) == allowed(undisturbed)


def test_output_tokens_that_do_not_follow_the_grammar_are_refused() -> None:
    with pytest.raises(GrammarError, match="do not follow its grammar"):
        grammars_of().get(regex("[xy]")).matcher(TOKENIZER.encode("q"))


def test_a_token_that_is_not_allowed_cannot_be_consumed() -> None:
    with pytest.raises(GrammarError, match="cannot be followed"):
        grammars_of().get(regex("[xy]")).matcher().consume(TOKENIZER.encode("q")[0])


def test_matchers_of_one_grammar_are_independent() -> None:
    compiled = grammars_of().get(regex("yz"))
    first, second = compiled.matcher(), compiled.matcher()
    first.consume(YES)
    assert allowed_texts(first) == {"z"} and allowed_texts(second) == {"y"}


def test_the_most_recently_used_grammars_are_cached() -> None:
    grammars = grammars_of(max_cached_mb=2)
    first = grammars.get(regex("a"))
    grammars.get(regex("b"))
    assert grammars.cached(regex("a")) is first  # the most recently used, so it stays
    grammars.get(regex("c"))
    assert grammars.cached(regex("b")) is None
    assert grammars.get(regex("a")) is first


@pytest.mark.parametrize(
    ("thinking", "text"),
    [
        (Thinking("<think>", "</think>", opened=False), "<think>so <b> it is</think>\n\nyes"),
        (Thinking("<think>", "</think>", opened=False), "yes"),
        (Thinking("<think>", "</think>", opened=False), "\n<think></think>yes"),
        (Thinking("<think>", "</think>", opened=True), "hm</think>yes"),
        (Thinking(IM_START, IM_END, opened=False), f"{IM_START}hm{IM_END}\nyes"),
        (Thinking(IM_START, IM_END, opened=False), "yes"),
        (Thinking(IM_START, IM_END, opened=True), f"hm{IM_END}yes"),
    ],
)
def test_a_model_can_reason_before_the_grammar_applies(thinking: Thinking, text: str) -> None:
    assert follows(grammars_of(), regex("yes", thinking), text)
    assert not follows(grammars_of(), regex("yes", thinking), text + "!")


THE_ID = TOKENIZER.encode("the")[0]
"""A tag that is one token with text, like the tags of Qwen 3."""


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("grammar", [regex("y"), lark(ANY_ANSWER)], ids=["form", "any"])
@pytest.mark.parametrize(("close", "close_id"), [(IM_END, IM_END_ID), ("the", THE_ID)])
def test_reasoning_ends_when_its_budget_is_used_up(
    grammar: Grammar, opened: bool, max_tokens: int, close: str, close_id: int
) -> None:
    thinking = Thinking(IM_START, close, opened, budget=ThinkingBudget(max_tokens, IM_START_ID, close_id))
    compiled = grammars_of().get(Grammar(grammar.kind, grammar.source, thinking))
    matcher = compiled.matcher(() if opened else (IM_START_ID,))
    for _ in range(max_tokens):
        assert {"a", close} <= allowed_texts(matcher)
        assert EOS_ID not in allowed(matcher)
        matcher = matcher.copy()
        matcher.consume(TOKENIZER.encode("a")[0])
    assert allowed(matcher) == matcher.forced() == [close_id]
    resumed = compiled.matcher(matcher.tokens)
    for one in (matcher, resumed):
        one.consume(close_id)
        one.consume(YES)
        assert one.accepting


def test_the_closing_tag_within_the_budget_ends_reasoning_in_any_spelling() -> None:
    thinking = Thinking(IM_START, "the", opened=True, budget=ThinkingBudget(9, IM_START_ID, THE_ID))
    compiled = grammars_of().get(regex("y", thinking))
    matcher = compiled.matcher([*TOKENIZER.encode("a"), THE_ID])
    assert allowed_texts(matcher) == {" ", "\t", "\r", "\n", "y"}
    spelt = compiled.matcher(TOKENIZER.encode("t") + TOKENIZER.encode("h"))
    assert "e" not in allowed_texts(spelt)


def test_an_answer_without_reasoning_cannot_start_it_later_without_a_budget() -> None:
    thinking = Thinking(IM_START, IM_END, opened=False, budget=ThinkingBudget(1, IM_START_ID, IM_END_ID))
    matcher = grammars_of().get(lark(ANY_ANSWER, thinking)).matcher()
    assert {IM_START, IM_END, "a", "<|eos|>"} <= allowed_texts(matcher)
    matcher.consume(YES)
    assert matcher.accepting and allowed_texts(matcher) >= {IM_END, "a", "<|eos|>"}
    assert IM_START_ID not in allowed(matcher)


MIXED = Thinking(f"{IM_START}thought", f"{IM_END}{IM_START}", opened=False, before_answer=f"final{IM_END}")
"""Tags of special tokens with text between them. One special token is in both tags."""


@pytest.mark.parametrize(
    ("thinking", "thought", "before"),
    [
        (MIXED, f"{IM_START}thought so{IM_END}{IM_START}", f"final{IM_END}"),
        (HARMONY_THINKING, "<|channel|>analysis<|message|>so<|end|><|start|>assistant", "<|channel|>final<|message|>"),
    ],
)
def test_an_answer_has_its_fixed_start_with_and_without_reasoning(
    thinking: Thinking, thought: str, before: str
) -> None:
    grammar = regex("yes", thinking)
    assert follows(grammars_of(), grammar, f"{thought}{before}yes")
    assert follows(grammars_of(), grammar, f"{before}yes")
    assert not follows(grammars_of(), grammar, "yes")
    assert not follows(grammars_of(), grammar, f"{thought}yes")


def test_a_model_whose_reasoning_is_open_cannot_answer_before_it_is_closed() -> None:
    thinking = Thinking("<think>", "</think>", opened=True)
    assert not follows(grammars_of(), regex("yes", thinking), "yes")
    assert EOS_ID not in allowed(grammars_of().get(regex("yes", thinking)).matcher())


def test_json_can_be_indented_but_not_padded_without_limit() -> None:
    grammar = json('{"type":"object"}')
    assert follows(grammars_of(), grammar, '{\n  "a": [\n    1,\n    2\n  ]\n}')
    assert follows(grammars_of(), grammar, '{"a":1}')
    assert not follows(grammars_of(), grammar, '{\n\n\n"a":1}')
    assert not follows(grammars_of(), grammar, '{"a":   1}')


def test_a_tag_that_is_a_special_token_is_generated_as_that_token() -> None:
    assert follows(grammars_of(), lark(f'start: "{IM_START}" "yes"'), f"{IM_START}yes")


def test_grammars_of_llama_cpp_are_converted() -> None:
    grammar = lark('root ::= "yes" | "no" [0-9]+')
    assert follows(grammars_of(), grammar, "no12")
    assert not follows(grammars_of(), grammar, "yes12")
