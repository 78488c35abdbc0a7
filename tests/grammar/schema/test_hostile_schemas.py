"""Schemas that were made to take long, or to have answers that violate them."""

import json
import time
from typing import Any

import pytest

from motet.errors import GrammarError
from motet.grammar.schema import patterns
from motet.grammar.schema.client_schema import closed_source, read_schema
from motet.grammar.schema.formats import PATTERNS
from motet.grammar.schema.normal_form import normal_form
from tests.grammar import models
from tests.grammar.models import follows, grammars_of

GRAMMARS = grammars_of()
Schema = dict[str, Any]
MAX_CPU_S = 2.0
"""The schemas here took minutes, or more memory than a machine has. They take less than half a second now."""


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def doubled(keyword: str, last: object, levels: int = 40) -> Schema:
    """Returns definitions that each refer to the next one twice."""
    return {f"d{at}": {keyword: [ref(f"d{at + 1}")] * 2} for at in range(levels)} | {f"d{levels}": last}


def chain(keyword: str, last: object, levels: int = 1200) -> Schema:
    return {f"d{at}": {keyword: [ref(f"d{at + 1}")]} for at in range(levels)} | {f"d{levels}": last}


OBJECT = {"type": "object"}
LONG: dict[str, Schema] = {
    "parts of oneOf refer to themselves in allOf": {
        "oneOf": [ref("a"), OBJECT],
        "$defs": {"a": {"type": "object", "allOf": [ref("a")]}},
    },
    "parts of oneOf are references in a circle": {"oneOf": [ref("a"), OBJECT], "$defs": {"a": ref("b"), "b": ref("a")}},
    "parts of oneOf refer to themselves in anyOf": {
        "oneOf": [ref("a"), OBJECT],
        "$defs": {"a": {"anyOf": [ref("a"), {"type": "string"}]}},
    },
    "items that must differ are references in a circle": {
        "type": "array",
        "items": ref("a"),
        "uniqueItems": True,
        "$defs": {"a": ref("a")},
    },
    "propertyNames is a circle": {"propertyNames": ref("a"), "$defs": {"a": ref("a")}},
    "doubled allOf": {"oneOf": [ref("d0"), OBJECT], "$defs": doubled("allOf", OBJECT)},
    "doubled anyOf without a value": {"oneOf": [ref("d0"), OBJECT], "$defs": doubled("anyOf", False)},
    "long chain of allOf": {"oneOf": [ref("d0"), OBJECT], "$defs": chain("allOf", OBJECT)},
    "long chain of anyOf": {"oneOf": [ref("d0"), OBJECT], "$defs": chain("anyOf", OBJECT)},
    "known names of many parts": {
        "unevaluatedProperties": False,
        **ref("d0"),
        "$defs": {f"d{at}": {"allOf": [ref(f"d{at + 1}")] * 50} for at in range(7)} | {"d7": {}},
    },
    "complement of many required properties": {"not": {"required": [f"n{at}" for at in range(10_000)]}},
    "complements of many constants": {
        "anyOf": [{"not": ref("e")} for _ in range(500)],
        "$defs": {"e": {"enum": list(range(5000))}},
    },
    "complement of many items": {"not": {"prefixItems": [{"type": "string"}] * 4000}},
    "many parts of oneOf": {
        "oneOf": [{"type": "object", "properties": {f"a{at}": {"type": "string"}}} for at in range(1500)]
    },
    "many parts of oneOf with many constants": {"oneOf": [ref("e")] * 30, "$defs": {"e": {"enum": list(range(2000))}}},
    "many patterns and names in oneOf": {
        "oneOf": [
            {
                "type": "object",
                "required": [f"r{at}" for at in range(1000)],
                "patternProperties": {f"^x{at}z": {} for at in range(1000)},
            }
        ]
        * 2
    },
    "long arrays of unique items": {
        "anyOf": [{"type": "array", "uniqueItems": True, "items": ref("e")} for _ in range(450)],
        "$defs": {"e": {"enum": [["x" * 8000] * 6, ["y" * 8000] * 3, 1, 2, 3]}},
    },
    "many anchors": {
        "anyOf": [{"$ref": f"#a{at}"} for at in range(1500)],
        "$defs": {f"x{at}": {"$anchor": f"a{at}"} for at in range(1500)},
    },
    "many ids": {
        "anyOf": [{"$ref": f"http://x/a{at}"} for at in range(1500)],
        "$defs": {f"x{at}": {"$id": f"http://x/a{at}"} for at in range(1500)},
    },
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("work", [read_schema, closed_source])
def test_a_schema_that_multiplies_is_read_or_refused_in_a_moment(name: str, work: Any) -> None:
    source, start_s = json.dumps(LONG[name]), time.thread_time()
    try:
        work(source)
    except GrammarError as error:
        assert len(error.message) < 1000
    assert time.thread_time() - start_s < MAX_CPU_S


NOT_INTEGER, DICT_A = {"not": {"type": "integer"}}, {"properties": {"a": {"type": "string"}}}
ORDERED = {"type": "array", "items": {"enum": list("abcdef")}, "uniqueItems": True, "minItems": 2}


@pytest.mark.parametrize(
    ("schema", "bad"),
    [
        ({"oneOf": [NOT_INTEGER, {"type": "number"}]}, "1.5"),
        ({"oneOf": [ORDERED, {"const": ["b", "a"]}]}, '["b","a"]'),
        ({"allOf": [{"not": DICT_A}], "unevaluatedProperties": False}, '{"a":1}'),
        ({"type": "array", "items": {"const": True}, "contains": {"const": 1}}, "[true]"),
        ({"type": "array", "items": {"enum": [1, 1.0]}, "uniqueItems": True}, "[1,1.0]"),
        ({"oneOf": [{"required": ["k"], "properties": {"k": {"const": str(at)}}} for at in range(24)]}, "5"),
        ({"dependencies": {"a": ["b"]}, "dependentRequired": {"c": ["d"]}}, '{"a":1}'),
        ({"dependencies": {"a": {"required": ["b"]}}, "dependentSchemas": {"a": {"required": ["c"]}}}, '{"a":1,"c":1}'),
    ],
)  # fmt: skip
def test_an_answer_that_violates_the_schema_is_not_allowed(schema: Schema, bad: str) -> None:
    try:
        assert not follows(GRAMMARS, models.json(json.dumps(schema)), bad)
    except GrammarError as error:
        assert "at " in error.message


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
@pytest.mark.parametrize("schema", ['{"const":[%s]}', '{"enum":[%s]}', '{"minimum":%s}', '{"multipleOf":%s}'])
def test_a_number_that_no_float_can_be_is_refused(schema: str, number: str) -> None:
    with pytest.raises(GrammarError, match=r"at (const|enum|minimum|multipleOf): (a number is|expected)"):
        read_schema(schema % number)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$id": "http://a/", "items": {"$id": "http://["}}, 'at items.$id: "http://[" is not a URI'),
        ({"$ref": "#/" + "a/" * 9000}, "at $ref: '#/" + "a/" * 49 + "...' does not exist"),
        ({"properties": {"a": {"contains": False}}, "items": {"$ref": "#/properties/a"}}, "at properties.a.contains: "),
        ({"anyOf": [{"contains": False}], "items": {"$ref": "#/anyOf/0"}}, "at anyOf[0].contains: "),
        ({"not": {"const": 2**70}}, "at not: the keyword 'not' is supported only for types"),
        ({"if": {"const": 1}, "then": {"const": 2**53 + 1}}, "at then.const: 9007199254740993 cannot be generated"),
        ({"dependentSchemas": {"a": {"multipleOf": 1e-9}}}, "at dependentSchemas.a.multipleOf: "),
    ],
)
def test_an_error_names_the_place_in_the_clients_schema(schema: Schema, message: str) -> None:
    with pytest.raises(GrammarError) as info:
        read_schema(json.dumps(schema))
    assert info.value.message.startswith(message)


def test_a_text_that_starts_with_a_bracket_can_be_excluded() -> None:
    schema = {"type": "string", "not": {"enum": ["[a", "&&", "~~b"]}}
    texts = ['"[a"', '"[b"', '"&&"', '"&a"', '"~~b"', '"x"']
    allowed = [follows(GRAMMARS, models.json(json.dumps(schema)), text) for text in texts]
    assert allowed == [False, True, False, True, False, True]


def test_all_patterns_of_formats_fit_into_the_memory_of_a_pattern() -> None:
    assert [name for name, pattern in PATTERNS.items() if patterns.matches(pattern, "") is None] == []


def test_definitions_named_after_their_path_keep_it_when_the_schema_is_read_again() -> None:
    found = normal_form({"anyOf": [{"type": "string"}, {"$ref": "#/anyOf/0"}]})
    assert normal_form(found) == found
    assert found["$defs"] == {"$.anyOf.0": {"type": "string"}}
