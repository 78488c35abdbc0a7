"""Masks of several matchers, and the limits of their work."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLParserLimits

from motet.errors import GrammarError
from motet.grammar import compiled_grammar
from motet.grammar.compiled_grammar import Grammars, Matcher, fill_masks, mask_words
from tests.grammar.models import TOKENIZER, VOCAB_SIZE, grammars_of, lark, regex
from tests.grammar.models import json as models_json

pytestmark = pytest.mark.slow

WORDS = mask_words(VOCAB_SIZE)


def masks_of(grammars: Grammars, sources: list[str]) -> list[list[int]]:
    matchers = [grammars.get(regex(source)).matcher() for source in sources]
    out = np.zeros((len(matchers) + 1, WORDS), np.int32)
    assert fill_masks(matchers, out) == {}
    assert not out[-1].any()  # this row has no matcher
    return [row.tolist() for row in out[:-1]]


def test_each_row_has_the_tokens_that_its_matcher_allows() -> None:
    grammars = grammars_of()
    alone = [masks_of(grammars, [source])[0] for source in "aba"]
    assert masks_of(grammars, ["a", "b", "a"]) == alone


def test_masks_can_be_filled_without_matchers() -> None:
    assert fill_masks([], np.zeros((0, WORDS), np.int32)) == {}


def failing(matchers: Sequence[Matcher], tokens: Sequence[int]) -> dict[int, GrammarError]:
    """Feeds tokens to all matchers until one of them fails, and returns the errors by row."""
    out = np.zeros((len(matchers), WORDS), np.int32)
    for token in tokens:
        if failed := fill_masks(matchers, out):
            return failed
        for row, matcher in enumerate(matchers):
            try:
                matcher.consume(token)
            except GrammarError as error:
                return {row: error}
    raise AssertionError("no matcher fails")


def test_a_matcher_that_exceeds_a_limit_fails_alone() -> None:
    grammars = grammars_of()
    heavy = grammars.get(lark('start: (("a"{1,1000}){1,1000}){1,1000}')).matcher()
    light = grammars.get(regex("a*")).matcher()
    failed = failing([light, heavy], TOKENIZER.encode("a", add_special_tokens=False) * 100)
    assert list(failed) == [1]
    assert "cannot be followed any further" in failed[1].message
    assert light.inner.is_accepting()


def test_a_grammar_that_fails_wherever_a_choice_goes_is_refused_when_it_is_compiled() -> None:
    """The intersection of this pattern with the length exceeds a limit of the lexer after one letter. Each request used
    to be accepted, and failed in its answer."""
    words = {"type": "string", "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)", "minLength": 1, "maxLength": 5000}
    schema = {"type": "object", "properties": {"a": words, "n": {"type": "integer"}}, "required": ["a", "n"]}
    with pytest.raises(GrammarError, match=r"^at properties\.a: lexer error: too many expressions"):
        grammars_of().get(models_json(json.dumps(schema)))
    grammars_of().get(models_json(json.dumps({**words, "maxLength": 50})))


@pytest.mark.parametrize(
    "source",
    ["start: a a a a a a\na: b*\nb: c*\nc: /[a-z ]/*", 'start: a\na: a a a | a a | "e" | /[a-z ]/'],
    ids=["empty parts", "pairs"],
)
def test_an_ambiguous_grammar_fails_before_its_masks_take_long(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "MAX_TOKEN_S", 0.005)
    matcher = grammars_of().get(lark(source)).matcher()
    failed = failing([matcher], TOKENIZER.encode("the answer to the question " * 20))
    assert "it is so ambiguous that a token takes more than 0.1 s" in failed[0].message
    assert matcher.token_s < 0.1


def test_the_lexer_of_choices_that_have_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance shares it between all matchers of a grammar."""
    monkeypatch.setattr(compiled_grammar, "PARSER_LIMITS", LLParserLimits(step_lexer_fuel=2_000))
    form = json.dumps({"type": "string", "pattern": "^(?:x|[ab]*[^x]{1,600}y)$"})
    grammar = grammars_of().get(models_json(form))
    first, second, third = (grammar.matcher(TOKENIZER.encode('"', add_special_tokens=False)) for _ in range(3))
    failed = failing([first], TOKENIZER.encode("ab" * 40, add_special_tokens=False))
    assert "lexer error" in failed[0].message
    copy = second.copy()
    for matcher in (second, copy, third, grammar.matcher(TOKENIZER.encode('"', add_special_tokens=False))):
        for token in TOKENIZER.encode('x"', add_special_tokens=False):
            assert fill_masks([matcher], np.zeros((1, WORDS), np.int32)) == {}
            matcher.consume(token)
        assert matcher.inner.is_accepting()


def test_a_lexer_that_is_full_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "PARSER_LIMITS", LLParserLimits(max_lexer_states=120))
    grammar = grammars_of().get(regex("(?:abc|[b-z]{1,40}|a[a-z]{40,60})*"))
    for letter in "bcdefghijk":
        matcher = grammar.matcher()
        for token in TOKENIZER.encode(letter * 30, add_special_tokens=False):
            assert fill_masks([matcher], np.zeros((1, WORDS), np.int32)) == {}
            matcher.consume(token)


PATTERN = json.dumps({"type": "string", "pattern": "^(?:x|[ab]*[^x]{1,600}y)$"})
OPENING = TOKENIZER.encode('"', add_special_tokens=False)


def test_several_choices_that_fail_in_a_step_do_not_end_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "PARSER_LIMITS", LLParserLimits(step_lexer_fuel=2_000))
    grammar = grammars_of().get(models_json(PATTERN))
    *hostile, last = (grammar.matcher(OPENING) for _ in range(4))
    failed = set[int]()
    for token in TOKENIZER.encode("ab" * 40, add_special_tokens=False):
        matchers = [each for number, each in enumerate(hostile) if number not in failed]
        numbers = [number for number in range(len(hostile)) if number not in failed]
        errors = fill_masks([*matchers, last], np.zeros((len(matchers) + 1, WORDS), np.int32))
        assert len(matchers) not in errors
        failed |= {numbers[row] for row in errors}
        for number in set(numbers) - failed:
            try:
                hostile[number].consume(token)
            except GrammarError:
                failed.add(number)
    assert failed == {0, 1, 2}
    for token in TOKENIZER.encode('x"', add_special_tokens=False):
        last.consume(token)
    assert last.accepting


def test_choices_continue_with_another_lexer_for_a_limited_time_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "PARSER_LIMITS", LLParserLimits(step_lexer_fuel=2_000))
    either = {"anyOf": [{"type": "integer"}, json.loads(PATTERN)]}
    grammar = grammars_of().get(models_json(json.dumps({"type": "array", "items": either})))
    long = [grammar.matcher(TOKENIZER.encode("[" + "1," * 3000, add_special_tokens=False)) for _ in range(6)]
    expected_s = [each.expected_s for each in long]
    assert failing([grammar.matcher()], TOKENIZER.encode('["' + "ab" * 40, add_special_tokens=False))
    assert all(after.expected_s > before for after, before in zip(long, expected_s, strict=True))
    monkeypatch.setattr(compiled_grammar, "MAX_REPLAY_S", 1.5 * max(each.expected_s for each in long))
    errors = fill_masks(long, np.zeros((len(long), WORDS), np.int32))
    assert 0 not in errors
    assert 5 in errors
    assert "another choice with this grammar has exceeded a limit" in errors[5].message
    assert long[0].mask_cpu_s < 0.05
