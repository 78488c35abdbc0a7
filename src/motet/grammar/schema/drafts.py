"""The drafts of JSON Schema, and their keywords in the form of draft 2020-12."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from referencing import Specification
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, specification_with

from motet.grammar.schema.keywords import DEFINITIONS, EXPECTED, NARROWED, dict_at, is_number

REF_HIDES: Final = (DRAFT4, DRAFT6, DRAFT7)
"""Drafts in which `$ref` hides the keywords next to it."""
KEPT: Final = frozenset([*EXPECTED, NARROWED, "const"]) - {*DEFINITIONS, "$anchor", "$dynamicAnchor", "$id", "$schema"}
"""The keywords that constrain values."""
INCLUSIVE: Final = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
EXCLUSIVE: Final = {inclusive: exclusive for exclusive, inclusive in INCLUSIVE.items()}
Keywords = dict[str, object]


def draft_of(schema: Mapping[str, object], *, default: Specification[Any]) -> Specification[Any]:
    """Returns the draft that `$schema` names, or `default`."""
    if "$schema" not in schema:
        return default
    uri = str(schema["$schema"]).replace("https://json-schema.org/draft-0", "http://json-schema.org/draft-0")
    found: Specification[Any] = specification_with(uri, default=default)
    return found


def modern_keywords(schema: Mapping[str, object], *, draft: Specification[Any]) -> Iterator[tuple[str, str, object]]:
    """Yields the keywords of a schema in the form of draft 2020-12. Each comes with the client's keyword, for errors,
    and with its value. Annotations are left out."""
    if draft in REF_HIDES and "$ref" in schema:
        schema = {"$ref": schema["$ref"]}
    for key, value in schema.items():
        if key in CONVERSIONS:
            yield from ((modern, key, each) for modern, each in CONVERSIONS[key](schema, key).items())
        elif key in KEPT:
            yield key, key, value


def _items(schema: Mapping[str, object], key: str) -> Keywords:
    items = schema[key]
    return ({"prefixItems": items} if items else {}) if isinstance(items, list) else {key: items}


def _additional_items(schema: Mapping[str, object], key: str) -> Keywords:
    return {"items": schema[key]} if isinstance(schema.get("items"), list) else {}


def _dependencies(schema: Mapping[str, object], key: str) -> Keywords:
    given = dict_at(schema, key)
    names = {name: each for name, each in given.items() if isinstance(each, list)}
    schemas = {name: each for name, each in given.items() if not isinstance(each, list)}
    return ({"dependentRequired": names} if names else {}) | ({"dependentSchemas": schemas} if schemas else {})


def _exclusive(schema: Mapping[str, object], key: str) -> Keywords:
    """Returns the bound. In draft 4 the value is a boolean, and the number is the inclusive bound."""
    value = schema[key]
    bound = schema.get(INCLUSIVE[key]) if value is True else value
    return {key: bound} if is_number(bound) else {}


def _inclusive(schema: Mapping[str, object], key: str) -> Keywords:
    return {} if schema.get(EXCLUSIVE[key]) is True else {key: schema[key]}


CONVERSIONS: Final[Mapping[str, Callable[[Mapping[str, object], str], Keywords]]] = {
    "items": _items,
    "additionalItems": _additional_items,
    "dependencies": _dependencies,
    **dict.fromkeys(INCLUSIVE, _exclusive),
    **dict.fromkeys(EXCLUSIVE, _inclusive),
}
