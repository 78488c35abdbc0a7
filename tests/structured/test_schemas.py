"""What the grammar of each schema lets a choice write, against the reference implementation of JSON Schema.

It must allow only what is valid, and what the suite knows to be valid; a real model is asked in
`tests/e2e/test_structured.py`.
"""

import json
from random import Random

import pytest

from motet.grammar.compiled import CompiledGrammar
from motet.types import Grammar, GrammarKind
from tests.grammar.models import grammars_of
from tests.structured.judge import Judge
from tests.structured.schemas.case import Schema, SchemaCase
from tests.structured.schemas.every import CASES
from tests.structured.walking import accepts, walk

GRAMMARS = grammars_of()
WALKS = 3

every_schema = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def compiled(case: SchemaCase) -> CompiledGrammar:
    return GRAMMARS.get(Grammar(GrammarKind.JSON, json.dumps(case.schema)))


@every_schema
def test_whatever_the_grammar_allows_is_valid(case: SchemaCase) -> None:
    judge, grammar = Judge(case.schema), compiled(case)
    for number in range(WALKS):
        text = walk(grammar, Random(f"{case.name} {number}"))
        assert judge.faults(text) == "", text


@every_schema
def test_valid_answers_are_allowed_and_others_are_not(case: SchemaCase) -> None:
    judge, grammar = Judge(case.schema), compiled(case)
    for text in case.good:
        assert (judge.faults(text), accepts(grammar, text)) == ("", True), text
    for text in case.bad:
        assert judge.faults(text) != "", text
        assert not accepts(grammar, text), text


def test_there_are_many_schemas_of_different_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 100


def test_what_is_known_not_to_be_enforced() -> None:
    """Keys that come twice are counted twice. Once this fails, more is enforced than is known."""
    schema: Schema = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}
    assert accepts(GRAMMARS.get(Grammar(GrammarKind.JSON, json.dumps(schema))), '{"a":1,"a":2}')
