"""Objects have the properties that their schema names, and no others, unless the schema itself decides."""

import json
from typing import Any

import pytest

from motet.grammar.limits import MAX_SOURCE_CHARS
from motet.grammar.schema.client_schema import closed_source
from motet.grammar.schema.closed import MAX_WORK
from tests.grammar import models
from tests.grammar.models import follows, grammars_of

GRAMMARS = grammars_of()
INTEGER = {"type": "integer"}
Schema = dict[str, Any]


def obj(*required: str, **properties: object) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


A, B = obj("a", a=INTEGER), obj("b", b=INTEGER)
C = obj("c", c=A)
ONE_OF_TWO = [{"required": ["a"]}, {"required": ["b"]}]
BASE = {"$ref": "#/$defs/base"}
OPEN = {"additionalProperties": True}
IN_ALL: Schema = {"allOf": [BASE, B], "$defs": {"base": A}}
LINKED = obj(a=INTEGER, next={"$ref": "#"})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, ['{"a":1}'], ['{"a":1,"x":2}', "{}"]),
        (obj("a", "b", a=INTEGER), ['{"a":1,"b":[]}'], ['{"a":1,"b":1,"x":2}', '{"a":1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"x":1}']),
        (obj(o=A, l={"type": "array", "items": A}), ['{"o":{"a":1},"l":[{"a":1}]}'], ['{"o":{"a":1,"x":2}}']),
        (obj(l={"prefixItems": [A], "items": A, "type": "array"}), ['{"l":[{"a":1}]}'], ['{"l":[{"a":1,"x":2}]}']),
        ({"anyOf": [A, B, {"type": "null"}]}, ['{"a":1}', '{"b":1}', "null"], ['{"a":1,"b":1}', '{"b":1,"x":1}']),
        (BASE | {"$defs": {"base": A}}, ['{"a":1}'], ['{"a":1,"x":2}']),
        ({"allOf": [BASE], "default": {}, "$defs": {"base": A}}, ['{"a":1}'], ['{"a":1,"x":2}']),
        (LINKED, ['{"a":1,"next":{"a":2,"next":{}}}'], ['{"next":{"x":1}}', '{"next":{"next":{"x":1}}}']),
        # No value could satisfy two closed parts.
        (IN_ALL, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"x":3}', '{"a":1}']),
        ({"allOf": [A, {"anyOf": [B, C]}]}, ['{"a":1,"b":2}', '{"a":1,"c":{"a":1}}'], ['{"a":1,"b":2,"x":3}']),
        (B | {"$ref": "#/$defs/base", "$defs": {"base": A}}, ['{"b":2,"a":1}'], ['{"b":2,"a":1,"x":3}']),
        (A | {"anyOf": [B, C]}, ['{"a":1,"b":2}', '{"a":1,"c":{"a":1}}'], ['{"a":1}', '{"a":1,"b":2,"x":3}']),
        (obj(a=INTEGER, b=INTEGER) | {"anyOf": ONE_OF_TWO}, ['{"b":1}'], ["{}", '{"b":1,"x":1}']),
        ({"required": ["k"], "anyOf": [A, B]}, ['{"a":1,"k":2}'], ['{"a":1}']),
        # A part that another schema combines stays open where it is used alone: a circular part that is closed there
        # could not be compiled.
        (obj("both", "one", both={"allOf": [BASE, B]}, one=BASE) | {"$defs": {"base": A}},
         ['{"both":{"a":1,"b":2},"one":{"a":1,"x":2}}'], ['{"both":{"a":1,"b":2,"x":2},"one":{"a":1}}']),
        (obj(up={"$ref": "#/$defs/up"}) | {"$defs": {"up": {"allOf": [BASE]}, "base": obj(a=INTEGER, up=BASE)}},
         ['{"up":{"a":1,"up":{"a":1}}}'], ['{"up":{"x":1}}', '{"up":{"up":{"x":1}}}']),
        # The schema itself decides.
        (A | OPEN, ['{"a":1,"x":2}'], ['{"x":2}']),
        (A | {"additionalProperties": {"type": "null"}}, ['{"a":1,"x":null}'], ['{"a":1,"x":2}']),
        ({"allOf": [A | OPEN, B]}, ['{"a":1,"b":2,"x":3}'], ['{"a":1}']),
        (obj(o=A) | OPEN, ['{"o":{"a":1},"x":2}'], ['{"o":{"a":1,"x":2}}']),
        ({"type": "object"}, ['{"x":1}'], ["1"]),
        ({"type": "object", "properties": {}, "patternProperties": {"^x$": INTEGER}}, ['{"x":1}'], ['{"y":1}']),
        # Closed, these schemas would allow no value.
        (obj(a=INTEGER) | {"minProperties": 2, "required": ["a"]}, ['{"a":1,"x":2}'], ['{"a":1}']),
        ({"const": {"a": 1, "x": 2}, "properties": {"a": INTEGER}}, ['{"a":1,"x":2}'], ['{"a":1}']),
    ],
)  # fmt: skip
def test_objects_are_closed_unless_the_schema_decides(schema: Schema, good: list[str], bad: list[str]) -> None:
    closed = models.json(closed_source(json.dumps(schema)))
    assert [text for text in good if not follows(GRAMMARS, closed, text)] == []
    assert [text for text in bad if follows(GRAMMARS, closed, text)] == []


@pytest.mark.parametrize(
    "source",
    [
        "{",
        "[]",
        "7",
        '{"properties":5}',
        '{"properties":{"a":5},"allOf":7,"$ref":[]}',
        '{"$ref":"#/nowhere","items":{"anyOf":[3,{"required":{}}]}}',
        '{"allOf":[{"$ref":"#"}]}',
        '{"items":' * 5000 + "{}" + "}" * 5000,
        '{"title":"' + "x" * MAX_SOURCE_CHARS + '","properties":{}}',
    ],
)
def test_errors_of_a_schema_are_left_for_the_check(source: str) -> None:
    closed = closed_source(source)
    assert closed.startswith(source.removesuffix("}"))


@pytest.mark.slow
def test_a_schema_stays_open_where_it_would_become_too_wide_or_too_long() -> None:
    """A schema beyond these limits would be refused, and the open schema is not."""
    wide = {"allOf": [obj(**{f"{letter}{n}": {} for n in range(250)}) for letter in "ab"]}
    parts = [obj(**{f"{n:02}" + "x" * 4_000: {}}) for n in range(40)]
    large: list[Schema] = [wide, {"allOf": parts}, {"allOf": [{"properties": {}}] * MAX_WORK}]
    for schema in large:
        assert json.loads(closed_source(json.dumps(schema))) == schema
