"""Masks of several matchers, and the limits of their work."""

import numpy as np
import pytest

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import Grammars, fill_masks, mask_words
from tests.grammar.models import TOKENIZER, VOCAB_SIZE, grammars_of, lark, regex

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


def test_a_matcher_that_exceeds_a_limit_fails_alone() -> None:
    grammars = grammars_of()
    heavy = grammars.get(lark('start: (("a"{1,1000}){1,1000}){1,1000}')).matcher()
    letter = TOKENIZER.encode("a")[0]
    light = grammars.get(regex("a*")).matcher()
    out = np.zeros((2, WORDS), np.int32)
    with pytest.raises(GrammarError, match="cannot be followed any further"):
        for _ in range(100):
            assert fill_masks([light, heavy], out) == {}
            light.consume(letter)
            heavy.consume(letter)
    failed = fill_masks([light, heavy], out)
    assert list(failed) == [1]
    assert "cannot be followed any further" in failed[1].message
    assert light.inner.is_accepting()
    assert out[0].any()


@pytest.mark.parametrize(
    "source",
    ["start: a a a a a a\na: b*\nb: c*\nc: /[a-z ]/*", 'start: a\na: a a | "e" | /[a-z ]/'],
    ids=["empty parts", "pairs"],
)
def test_an_ambiguous_grammar_fails_before_its_masks_take_long(source: str) -> None:
    matcher, out = grammars_of().get(lark(source)).matcher(), np.zeros((1, WORDS), np.int32)
    for token in TOKENIZER.encode("the answer to the question " * 20):
        if failed := fill_masks([matcher], out):
            break
        matcher.consume(token)
    assert "Too many items" in failed[0].message
