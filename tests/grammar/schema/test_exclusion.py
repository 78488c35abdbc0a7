"""`oneOf`: a value follows exactly one of the parts."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from motet.errors import GrammarError
from motet.grammar.schema.client_schema import closed_source
from tests.grammar import models
from tests.grammar.models import follows, grammars_of

GRAMMARS = grammars_of()
Schema = dict[str, Any]
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def allows(schema: Schema, text: str) -> bool:
    return follows(GRAMMARS, models.json(json.dumps(schema)), text)


def one_of(*parts: object, **more: object) -> Schema:
    return {"oneOf": list(parts), **more}


def obj(*required: str, **properties: object) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def closed(*required: str, **properties: object) -> Schema:
    return obj(*required, **properties) | {"additionalProperties": False}


CAT, DOG = obj("kind", kind={"const": "cat"}), obj("kind", kind={"enum": ["dog", "wolf"]}, of={"$ref": "#/$defs/pet"})
PETS = one_of({"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"})
DEFS: Schema = {"$defs": {"pet": PETS, "cat": CAT, "dog": DOG}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Parts that exclude one another.
        ({"$ref": "#/$defs/pet"} | DEFS, ['{"kind":"dog","of":{"kind":"cat"}}', "null"], ['{"kind":"cow"}', "{}"]),
        (one_of({"type": "integer", "maximum": 3}, {"minimum": 3.5, "type": "number"}), ["3", "4", "3.5"], ["3.2"]),
        (one_of({"type": "integer", "maximum": 3}, {"type": "integer", "exclusiveMinimum": 3}), ["3", "4"], ["3.5"]),
        (one_of({"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}), ['"a"', '"ab"'], ["1"]),
        (one_of({"const": "ab"}, {"type": "string", "pattern": "^b"}), ['"ab"', '"bc"'], ['"c"']),
        (one_of(closed("a", a=INTEGER), closed("b", b=INTEGER)), ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', "{}"]),
        (one_of({"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2, "items": INTEGER}),
         ["[true]", "[1,2]"], ["[true,2]"]),
        # Parts that overlap: the values of both are not valid.
        (one_of(INTEGER, {"type": ["number", "null"]}), ["null"], ["1", '"a"']),
        (one_of({"type": ["integer", "null"]}, {"type": ["integer", "boolean"]}), ["null", "true"], ["1"]),
        (one_of({"enum": ["a", "b"]}, {"enum": ["b", "c"]}), ['"a"', '"c"'], ['"b"']),
        (one_of(closed(a=INTEGER), closed(b=INTEGER)), ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
        (one_of({"required": ["a"]}, {"required": ["b"]}, **obj(a=INTEGER, b=INTEGER)),
         ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
        (one_of(obj("a", a=STRING), obj("a", a={"type": "null"}, b=INTEGER), {"type": "array"}),
         ['{"a":"x"}', '{"a":null}', "[]"], ['{"a":1}', '"a"']),
        # Without a type, both parts allow all values of other types, so neither does.
        (one_of(closed("a", a=INTEGER) | {"type": ["object", "string"]}, {"required": ["b"]}),
         ['{"a":1}', "1"], ['"x"']),
        (one_of(True, STRING), ["1", "null"], ['"a"']),
        (one_of(STRING, False), ['"a"'], ["1"]),
        (one_of(STRING, INTEGER, anyOf=[{"maxLength": 1}, {"const": 5}]), ['"a"', "5"], ['"ab"']),
    ],
)  # fmt: skip
def test_exactly_one_part_is_followed(schema: Schema, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not allows(schema, text)] == []
    assert [text for text in bad if allows(schema, text)] == []


def test_many_parts_with_a_discriminator_are_compared_by_it() -> None:
    parts = [obj("kind", kind={"const": f"k{number}"}) for number in range(400)]
    assert allows(one_of(*parts), '{"kind":"k399"}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (one_of(obj("a", a=INTEGER), obj("b", b=STRING)), ['{"a":1}', '{"b":"x"}'], ['{"a":1,"b":"x"}', "{}"]),
        (one_of(CAT, obj("kind", kind={"const": "cow"}, milk=INTEGER)),
         ['{"kind":"cow","milk":1}'], ['{"kind":"dog"}']),
        # Each of these values follows the other part too, if objects are open as in the standard.
        (one_of(obj(a=INTEGER), obj(b=INTEGER)), [], ['{"a":1}', '{"b":1}', "{}"]),
        ({"$ref": "#/$defs/p", "$defs": {"p": one_of({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}),
                                         "a": obj(a=INTEGER), "b": obj("c", c=INTEGER)}},
         ['{"a":1}'], ['{"c":1}']),
    ],
)  # fmt: skip
def test_closed_objects_follow_exactly_one_part_of_the_schema_as_it_was_sent(
    schema: Schema, good: list[str], bad: list[str]
) -> None:
    try:
        grammar = models.json(closed_source(json.dumps(schema)))
        GRAMMARS.get(grammar)
    except GrammarError:
        assert not good
        return
    assert [text for text in good if not follows(GRAMMARS, grammar, text)] == []
    assert [text for text in bad if follows(GRAMMARS, grammar, text)] == []
    oracle = Draft202012Validator(schema)
    assert [text for text in good if not oracle.is_valid(json.loads(text))] == []


@pytest.mark.parametrize(
    "schema",
    [
        one_of({"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}),
        one_of({"type": "array", "items": INTEGER}, {"type": "array", "items": STRING}),
        one_of({"multipleOf": 2}, {"multipleOf": 3}),
    ],
)
def test_parts_that_can_overlap_are_refused_with_an_alternative(schema: Schema) -> None:
    with pytest.raises(GrammarError, match=r"at oneOf: it is not certain .* exclude one another; use 'anyOf'"):
        GRAMMARS.get(models.json(json.dumps(schema)))
