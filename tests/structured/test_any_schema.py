"""Random schemas: what their grammars allow, against the reference implementation.

Grammars are known to allow two things that are not valid, so no schema asks for them: a key that comes twice where keys
are counted, and a number with more digits than a double has, just inside an excluded bound. They refuse much that is
valid, as a grammar writes each value in one way; that is not checked here.
"""

import json
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motet.errors import GrammarError
from motet.grammar.closed import closed_source
from motet.types import Grammar, GrammarKind
from tests.grammar.models import grammars_of
from tests.property_settings import examples
from tests.structured.any_schema import schemas
from tests.structured.judge import Judge
from tests.structured.schemas.case import Schema
from tests.structured.walking import accepts, walk

pytestmark = pytest.mark.slow

GRAMMARS = grammars_of()
MUTANTS = 6
LETTERS = '0123456789-.eE"{}[],:abT \\n'


@examples(80)
@given(schemas, st.integers(0, 2**32))
def test_whatever_a_grammar_allows_is_valid_and_what_is_not_valid_is_refused(schema: Schema, seed: int) -> None:
    try:
        grammar = GRAMMARS.get(Grammar(GrammarKind.JSON, json.dumps(schema)))
    except GrammarError:
        event("refused")
        return
    event("compiled")
    judge, random = Judge(schema), Random(seed)
    text = walk(grammar, random)
    assert judge.faults(text) == "", text
    for _ in range(MUTANTS):
        other = mutant(text, random)
        if judge.faults(other):
            assert not accepts(grammar, other), other


@examples(80)
@given(schemas, st.integers(0, 2**32))
def test_a_schema_with_closed_objects_can_be_written_too_and_its_answers_are_valid(schema: Schema, seed: int) -> None:
    source = json.dumps(schema)
    try:
        GRAMMARS.get(Grammar(GrammarKind.JSON, source))
    except GrammarError:
        event("refused")
        return
    event("unchanged" if json.loads(closed_source(source)) == schema else "closed")
    text = walk(GRAMMARS.get(Grammar(GrammarKind.JSON, closed_source(source))), Random(seed))
    assert Judge(schema).faults(text) == "", text


def mutant(text: str, random: Random) -> str:
    """Returns the text with one character removed, changed or added."""
    at, until = (random.randrange(len(text)), random.randint(0, 1))
    return text[:at] + random.choice(("", random.choice(LETTERS))) + text[at + until :]
