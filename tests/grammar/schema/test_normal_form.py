"""Schemas of all drafts, with references of all kinds, have one form."""

import json
from typing import Any

import pytest

from motet.errors import GrammarError
from motet.grammar.limits import MAX_SCHEMAS
from motet.grammar.schema.keywords import dict_at
from motet.grammar.schema.normal_form import normal_form

Schema = dict[str, Any]
DRAFT4, DRAFT7 = "http://json-schema.org/draft-04/schema#", "https://json-schema.org/draft-07/schema"
INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"items": [INTEGER], "additionalItems": False}, {"prefixItems": [INTEGER], "items": False}),
        ({"items": INTEGER, "additionalItems": False}, {"items": INTEGER}),
        ({"items": []}, {}),
        ({"minimum": 3, "exclusiveMinimum": True}, {"exclusiveMinimum": 3}),
        ({"maximum": 3, "exclusiveMaximum": False}, {"maximum": 3}),
        ({"exclusiveMinimum": True}, {}),
        ({"dependencies": {"a": ["b"], "c": INTEGER}},
         {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": INTEGER}}),
        ({"title": "A", "description": "B", "examples": [1], "unknown": {"type": 3}, "type": "null"}, {"type": "null"}),
        ({"$schema": DRAFT7, "$ref": "#/definitions/a", "maxLength": 1, "definitions": {"a": INTEGER}},
         {"$ref": "#/$defs/$.definitions.a", "$defs": {"$.definitions.a": INTEGER}}),
        ({"$ref": "#/$defs/a", "maximum": 1, "$defs": {"a": INTEGER}},
         {"$ref": "#/$defs/a", "maximum": 1, "$defs": {"a": INTEGER}}),
    ],
)  # fmt: skip
def test_keywords_of_all_drafts_are_those_of_2020(schema: Schema, expected: Schema) -> None:
    assert normal_form(schema) == expected
    assert normal_form(expected) == expected


@pytest.mark.parametrize(
    ("ref", "document"),
    [
        ("#/$defs/a", {"$defs": {"a": INTEGER}}),
        ("#/definitions/a", {"definitions": {"a": INTEGER}}),
        ("#/$defs/a~1b~0c", {"$defs": {"a/b~c": INTEGER}}),
        ("#/$defs/a%20b", {"$defs": {"a b": INTEGER}}),
        ("#/$defs/a b", {"$defs": {"a b": INTEGER}}),
        ("#/$defs/%C3%A9", {"$defs": {"é": INTEGER}}),
        ("#/prefixItems/0", {"prefixItems": [INTEGER]}),
        ("#/other/place", {"other": {"place": INTEGER}}),
        ("#name", {"$defs": {"a": {"$anchor": "name", **INTEGER}}}),
        ("#name", {"$defs": {"a": {"$dynamicAnchor": "name", **INTEGER}}}),
        ("item", {"$id": "https://a/root", "$defs": {"a": {"$id": "item", **INTEGER}}}),
        ("https://a/item#/$defs/b", {"$defs": {"a": {"$id": "https://a/item", "$defs": {"b": INTEGER}}}}),
        ("https://a/item#name",
         {"$defs": {"a": {"$id": "https://a/item", "$defs": {"b": {"$anchor": "name", **INTEGER}}}}}),
        ("urn:example:item", {"$defs": {"a": {"$id": "urn:example:item", **INTEGER}}}),
        ("#name", {"$schema": DRAFT7, "definitions": {"a": {"$id": "#name", **INTEGER}}}),
        ("#name", {"$schema": DRAFT4, "definitions": {"a": {"id": "#name", **INTEGER}}}),
    ],
)  # fmt: skip
def test_a_reference_of_any_kind_leads_to_its_schema(ref: str, document: Schema) -> None:
    found = normal_form({**document, "properties": {"p": {"$ref": ref}}})
    [name] = dict_at(found, "$defs")
    assert found["properties"] == {"p": {"$ref": f"#/$defs/{name}"}}
    assert found["$defs"] == {name: INTEGER}
    assert normal_form(found) == found


def test_a_reference_in_an_embedded_resource_is_relative_to_it() -> None:
    inner = {"$id": "https://a/inner", "$ref": "#/$defs/x", "$defs": {"x": INTEGER}}
    found = normal_form({"items": {"$ref": "https://a/inner"}, "$defs": {"i": inner, "x": {"type": "null"}}})
    assert found["$defs"] == {"i": {"$ref": "#/$defs/$.$defs.i.$defs.x"}, "$.$defs.i.$defs.x": INTEGER}


def test_references_to_the_whole_schema_and_to_themselves_stay_circular() -> None:
    assert normal_form({"items": {"$ref": "#"}}) == {"items": {"$ref": "#"}}
    tree = {"$dynamicAnchor": "node", "items": {"$dynamicRef": "#node"}}
    assert normal_form(tree) == {"items": {"$ref": "#"}}
    assert normal_form(
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "items": {"$recursiveRef": "#"}}
    ) == {"items": {"$ref": "#"}}


def test_the_metaschemas_of_the_drafts_are_known() -> None:
    """The draft of a metaschema decides how it is read: here `exclusiveMinimum` depends on `minimum`."""
    found = normal_form({"$ref": DRAFT4})
    assert '"dependentRequired": {"exclusiveMaximum": ["maximum"]' in json.dumps(found)


def test_names_of_definitions_differ() -> None:
    document = {"$defs": {"a b": INTEGER, "a_b": {"type": "null"}}}
    found = normal_form({**document, "prefixItems": [{"$ref": "#/$defs/a%20b"}, {"$ref": "#/$defs/a_b"}]})
    assert found["$defs"] == {"a_b": INTEGER, "a_b-2": {"type": "null"}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"items": {"$ref": "#/$defs/a~1"}}, "at items.$ref: '#/$defs/a~1' does not exist"),
        ({"$ref": "#nowhere"}, "at $ref: '#nowhere' does not exist"),
        ({"$ref": "#/prefixItems/x", "prefixItems": [{}]}, "at $ref: '#/prefixItems/x' does not exist"),
        ({"$ref": "other.json"}, "at $ref: 'other.json' is not in this schema; others are not loaded"),
        ({"$ref": "http://[", "$id": "http://a"}, "at $ref: 'http://[' does not exist"),
        ({"$defs": {"a": {"$dynamicAnchor": "n"}, "b": {"$id": "b", "$dynamicAnchor": "n"}}, "$dynamicRef": "#n"},
         "at $dynamicRef: '$dynamicRef' is not supported where several schemas have the same anchor"),
        ({"$ref": "#", "$dynamicRef": "#"}, "at $dynamicRef: a schema can have only one reference"),
        ({"anyOf": [{}] * MAX_SCHEMAS}, f"the schema has more than {MAX_SCHEMAS} schemas inside it"),
    ],
)  # fmt: skip
def test_a_reference_that_leads_nowhere_is_refused(schema: Schema, message: str) -> None:
    with pytest.raises(GrammarError) as refused:
        normal_form(schema)
    assert refused.value.message == message
