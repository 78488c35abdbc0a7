"""What can be drawn is valid: random walks through grammars of schemas, judged by another reader of the standard."""

import json
import random
from collections.abc import Mapping

import jsonschema
import pytest

from tests.grammar import models
from tests.grammar.models import TOKENIZER, allowed, grammars_of
from tests.tiny_tokenizer import EOS_ID

CLOSING = [TOKENIZER.encode(text)[0] for text in ('"', "}", "]")]
MAX_TOKENS = 300

SCHEMAS: list[dict[str, object]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "array", "items": {"enum": ["x", 1, None, {"y": [True]}]}, "minItems": 1, "maxItems": 3},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2}x?$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 120, "multipleOf": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "k"}], "items": False, "minItems": 2},
    {"type": "object", "patternProperties": {"^n": {"type": "null"}}, "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, "v": {"type": type_}}, "required": ["kind", "v"]}
            for kind, type_ in (("i", "integer"), ("b", "boolean"))
        ]
    },
    {
        "allOf": [{"type": "object", "properties": {"a": {"maximum": 9}}}, {"properties": {"a": {"type": "integer"}}}],
        "required": ["a"],
        "additionalProperties": False,
        "properties": {"a": True},
    },
]


def drawn(schema: Mapping[str, object], seed: int) -> str | None:
    """An answer in tokens drawn at random, closing what is open more often than not; None if it did not end."""
    chance = random.Random(seed)
    matcher = grammars_of().get(models.json(json.dumps(schema))).matcher()
    written: list[int] = []
    while len(written) < MAX_TOKENS:
        may_come = allowed(matcher)
        assert may_come
        if may_come == [EOS_ID] or (EOS_ID in may_come and chance.random() < 0.5):
            assert matcher.accepting
            return TOKENIZER.decode(written)
        closing = [token for token in CLOSING if token in may_come]
        token = chance.choice(closing if closing and chance.random() < 0.6 else [t for t in may_come if t != EOS_ID])
        matcher.consume(token)
        written.append(token)
    return None


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_whatever_is_drawn_is_valid(schema: dict[str, object]) -> None:
    answers = [answer for seed in range(20) if (answer := drawn(schema, seed)) is not None]
    assert len(answers) >= 5
    for answer in answers:
        jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())
