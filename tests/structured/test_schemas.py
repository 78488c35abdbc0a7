"""The grammar of each schema is compared with the reference implementation of JSON Schema.

The grammar must allow no invalid text, and all texts that the case lists as valid. `tests/e2e/test_structured.py` sends
the same schemas to a real model.
"""

import json
from random import Random

import pytest

from motet.grammar.compiled_grammar import CompiledGrammar
from motet.types import Grammar, GrammarKind
from tests.grammar.models import grammars_of
from tests.structured.oracle import SchemaOracle
from tests.structured.schemas.case import Schema, SchemaCase
from tests.structured.schemas.every import CASES
from tests.structured.walk import accepts, walk

GRAMMARS = grammars_of()
WALKS = 3

every_schema = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def compiled(case: SchemaCase) -> CompiledGrammar:
    return GRAMMARS.get(Grammar(GrammarKind.JSON, json.dumps(case.schema)))


@every_schema
def test_all_texts_that_the_grammar_allows_are_valid(case: SchemaCase) -> None:
    oracle, grammar = SchemaOracle(case.schema), compiled(case)
    for number in range(WALKS):
        text = walk(grammar, Random(f"{case.name} {number}"))
        assert oracle.errors(text) == "", text


@every_schema
def test_valid_answers_are_allowed_and_invalid_ones_are_not(case: SchemaCase) -> None:
    oracle, grammar = SchemaOracle(case.schema), compiled(case)
    for text in case.good:
        assert (oracle.errors(text), accepts(grammar, text)) == ("", True), text
    for text in case.bad:
        assert oracle.errors(text) != "", text
        assert not accepts(grammar, text), text


def test_there_are_a_hundred_schemas_with_different_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 100


def test_a_repeated_key_counts_twice_as_documented() -> None:
    """If this fails, more is enforced than the documentation says."""
    schema: Schema = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}
    assert accepts(GRAMMARS.get(Grammar(GrammarKind.JSON, json.dumps(schema))), '{"a":1,"a":2}')
