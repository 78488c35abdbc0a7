"""Keywords that llguidance does not enforce are replaced by keywords that it does."""

import json
from typing import Any

import pytest

from motet.errors import GrammarError
from motet.grammar.schema.client_schema import read_schema
from motet.grammar.schema.lowering import MAX_DEPENDENT, not_enforced
from motet.grammar.schema.negation import pattern_without
from tests.grammar import models
from tests.grammar.models import follows, grammars_of

GRAMMARS = grammars_of()
Schema = dict[str, Any]
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
EXCLUDED = ("array", "object")


def obj(*required: str, **properties: object) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


CARD = obj(kind={"enum": ["card", "cash"]}, number=STRING)
BY_CARD = {"properties": {"kind": {"const": "card"}}, "required": ["kind"]}
A_TO_C = obj(a=INTEGER, b=INTEGER, c=INTEGER)
A_OR_B = {"a": ["b"], "b": ["a"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (CARD | {"if": BY_CARD, "then": {"required": ["number"]}},
         ['{"kind":"cash"}', '{"kind":"card","number":"1"}', "{}"], ['{"kind":"card"}']),
        (CARD | {"if": BY_CARD, "then": {"required": ["number"]}, "else": {"properties": {"number": False}}},
         ['{"kind":"cash"}', '{"kind":"card","number":"1"}'], ['{"kind":"cash","number":"1"}', '{"kind":"card"}']),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}},
         ['"a"', "null"], ['"ab"', "1"]),
        ({"if": {"$ref": "#/$defs/a"}, "else": {"const": 7}, "$defs": {"a": STRING}}, ['"ab"', "7"], ["8"]),
        (STRING | {"then": False, "else": False}, ['"a"'], []),
        ({"not": {"type": ["string", *EXCLUDED]}}, ["1", "null"], ['"a"', "[]"]),
        ({"type": ["null", "integer"], "not": {"enum": [3, 5, None]}}, ["2", "4", "6", "-3"], ["3", "5", "null"]),
        ({"type": "boolean", "not": {"const": True}}, ["false"], ["true"]),
        (STRING | {"not": {"enum": ["", "ab", "a]^-"]}}, ['"a"', '"abc"', '"b"', '"a]"'], ['""', '"ab"', '"a]^-"']),
        ({"type": "number", "not": {"minimum": 2, "maximum": 3}}, ["1.5", "3.5"], ["2", "2.5", "3"]),
        ({"type": "array", "not": {"minItems": 1, "maxItems": 1}, "items": INTEGER}, ["[]", "[1,2]"], ["[1]"]),
        (A_TO_C | {"not": {"required": ["a", "b"]}}, ['{"a":1}', '{"b":1,"c":1}', "{}"], ['{"a":1,"b":1}']),
        (A_TO_C | {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, ['{"c":1}'], ['{"a":1}', '{"b":1}']),
        (A_TO_C | {"not": {"properties": {"a": {"maximum": 3}}}}, ['{"a":4}'], ["{}", '{"a":3}']),
        (A_TO_C | {"not": {"$ref": "#/$defs/n"}, "$defs": {"n": {"not": {"required": ["a"]}}}}, ['{"a":1}'], ["{}"]),
        ({"type": "array", "items": INTEGER, "not": {"prefixItems": [{"const": 1}]}}, ["[2]", "[2,1]"], ["[]", "[1]"]),
        (A_TO_C | {"dependentRequired": {"a": ["b", "c"]}}, ['{"a":1,"b":1,"c":1}', '{"b":1}'], ['{"a":1,"b":1}']),
        (A_TO_C | {"dependencies": A_OR_B}, ['{"a":1,"b":1}', '{"c":1}'], ['{"a":1}', '{"b":1,"c":1}']),
        (A_TO_C | {"dependentSchemas": {"a": {"properties": {"b": {"const": 7}}}}},
         ['{"a":1,"b":7}', '{"b":1}', '{"a":1}'], ['{"a":1,"b":1}']),
        ({"dependentRequired": {"a": ["b"]}}, ["1", "[]", '{"a":1,"b":1}'], ['{"a":1}']),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"x":1,"xy":2}', "{}"], ['{"y":1}']),
        ({"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": INTEGER},
         ['{"x":1}'], ['{"xy":1}']),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "properties": {"a": INTEGER, "c": INTEGER}},
         ['{"a":1,"b":"x"}'], ['{"c":1}', '{"a":"x"}']),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "k"}}},
         ['{"k":1}'], ['{"a":1}']),
        ({"type": "object", "propertyNames": False}, ["{}"], ['{"a":1}']),
        ({"type": "array", "maxItems": 1, "uniqueItems": True}, ["[1]", "[]"], ["[1,1]"]),
        ({"type": "array", "uniqueItems": False}, ["[1,1]"], []),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
         ['["a","b"]', '["c","b","a"]'], ['["a","a"]', '["a"]', '["a","b","a"]']),
        ({"type": ["array", "null"], "items": {"type": "boolean"}, "uniqueItems": True},
         ["[true,false]", "null"], ["[true,true]"]),
        ({"type": "array", "items": INTEGER, "contains": INTEGER, "minContains": 2, "maxContains": 3},
         ["[1,2]"], ["[1]", "[1,2,3,4]"]),
        ({"type": "array", "contains": True}, ["[1]"], ["[]"]),
        ({"type": "array", "contains": STRING, "minContains": 0}, ["[]", "[1]"], []),
        ({"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
        ({"$ref": "#/$defs/n", "unevaluatedProperties": False, "$defs": {"n": {"properties": {"a": INTEGER}}}},
         ['{"a":1}'], ['{"b":1}']),
        ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, ["[1]"], ["[1,2]"]),
    ],
)  # fmt: skip
def test_a_keyword_is_enforced_through_others(schema: Schema, good: list[str], bad: list[str]) -> None:
    grammar = models.json(json.dumps(schema))
    assert [text for text in good if not follows(GRAMMARS, grammar, text)] == []
    assert [text for text in bad if follows(GRAMMARS, grammar, text)] == []


@pytest.mark.parametrize("words", [["a"], [""], ["", "a", "ab"], ["b", "abc"], ["\\", '"', "]"], ["日本", "日"]])
def test_a_pattern_excludes_exactly_the_words(words: list[str]) -> None:
    grammar = models.json(json.dumps({"type": "string", "pattern": pattern_without(words)}))
    texts = {"", "a", "ab", "abc", "b", "\\", '"', "]", "日", "日本", "x", "ac", "abcd"}
    assert {text for text in texts if follows(GRAMMARS, grammar, json.dumps(text, ensure_ascii=False))} == texts - {
        *words
    }


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"items": {"not": {"pattern": "a"}}}, "items.not"),
        ({"$defs": {"a": {"if": {"multipleOf": 2}, "then": False}}, "$ref": "#/$defs/a"}, "$defs.a.if"),
        ({"not": {"not": INTEGER}}, "not"),
        ({"not": {"const": []}}, "not"),
        ({"not": {"enum": ["x" * 500]}}, "not"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"uniqueItems": True, "items": {"enum": list(range(12))}}, "uniqueItems"),
        ({"contains": STRING}, "contains"),
        ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}, "propertyNames"),
        ({"propertyNames": {"pattern": "a", "maxLength": 2}}, "propertyNames"),
        ({"anyOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"allOf": [{}], "unevaluatedItems": False}, "unevaluatedItems"),
        ({"dependentRequired": {str(n): ["a"] for n in range(MAX_DEPENDENT + 1)}}, "dependentRequired"),
    ],
)
def test_a_keyword_without_a_replacement_is_refused_by_name(schema: Schema, place: str) -> None:
    with pytest.raises(GrammarError) as refused:
        read_schema(json.dumps(schema))
    keyword = place.rsplit(".", maxsplit=1)[-1]
    assert refused.value.message == f"at {place}: {not_enforced(keyword)}"


def test_complements_of_schemas_that_grow_exponentially_are_refused() -> None:
    defs = {f"n{at}": {"anyOf": [{"$ref": f"#/$defs/n{at + 1}"}] * 4} for at in range(11)} | {"n11": STRING}
    with pytest.raises(GrammarError, match="at not: the keyword 'not' is supported only for"):
        read_schema(json.dumps({"not": {"$ref": "#/$defs/n0"}, "$defs": defs}))
