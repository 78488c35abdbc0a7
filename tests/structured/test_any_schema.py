"""Random schemas: the texts that their grammars allow are compared with the reference implementation.

Grammars are known to allow two kinds of invalid texts, and no schema here leads to them: a repeated key where keys are
counted, and a number with more digits than a double has, next to an exclusive bound. Grammars refuse many valid texts,
because they allow only one notation of each value. This is not tested here.
"""

import json
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motet.errors import GrammarError
from motet.grammar.schema.client_schema import closed_source
from motet.types import Grammar, GrammarKind
from tests.grammar.models import grammars_of
from tests.property_settings import examples
from tests.structured.any_schema import schemas
from tests.structured.oracle import SchemaOracle
from tests.structured.schemas.case import Schema
from tests.structured.walk import accepts, walk

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

GRAMMARS = grammars_of()
MUTANTS = 6
LETTERS = '0123456789-.eE"{}[],:abT \\n'


@examples(80)
@given(schemas, st.integers(0, 2**32))
def test_texts_that_a_grammar_allows_are_valid_and_invalid_ones_are_refused(schema: Schema, seed: int) -> None:
    try:
        grammar = GRAMMARS.get(Grammar(GrammarKind.JSON, json.dumps(schema)))
    except GrammarError:
        event("refused")
        return
    event("compiled")
    oracle, random = SchemaOracle(schema), Random(seed)
    text = walk(grammar, random)
    assert oracle.errors(text) == "", text
    for _ in range(MUTANTS):
        other = mutant(text, random)
        if oracle.errors(other):
            assert not accepts(grammar, other), other


@examples(80)
@given(schemas, st.integers(0, 2**32))
def test_a_schema_with_closed_objects_has_answers_too_and_they_are_valid(schema: Schema, seed: int) -> None:
    source = json.dumps(schema)
    try:
        GRAMMARS.get(Grammar(GrammarKind.JSON, source))
    except GrammarError:
        event("refused")
        return
    event("unchanged" if json.loads(closed_source(source)) == schema else "closed")
    text = walk(GRAMMARS.get(Grammar(GrammarKind.JSON, closed_source(source))), Random(seed))
    assert SchemaOracle(schema).errors(text) == "", text


def mutant(text: str, random: Random) -> str:
    """Returns the text with one character removed, changed or added."""
    at, until = (random.randrange(len(text)), random.randint(0, 1))
    return text[:at] + random.choice(("", random.choice(LETTERS))) + text[at + until :]
