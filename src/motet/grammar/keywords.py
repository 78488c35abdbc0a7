"""The keywords of JSON Schema: what may stand in each, and which are not enforced and so refused.

Names that no draft knows are annotations, as the standard has it: they are ignored, as titles and descriptions are.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeGuard

FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)

TYPES: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})

NOT_ENFORCED: Final = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "disallow",
        "divisibleBy",
        "else",
        "extends",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Constraints that could not be held to."""

ONE_LINE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""All that `x-guidance`, by which llguidance is told how to compile, may be: formats of tool calls ask for it."""

SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")


class Expected(NamedTuple):
    what: str
    holds: Callable[[object], bool]


def is_object(value: object) -> bool:
    return isinstance(value, dict)


def is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 0


def is_string_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_COUNT = Expected("an integer of 0 or more", is_count)
_NUMBER = Expected("a number", is_number)
_STRING = Expected("a string", lambda value: isinstance(value, str))
_SCHEMA = Expected("a schema (an object or a boolean)", is_schema)
_SCHEMAS = Expected("an array of schemas, not empty", lambda value: isinstance(value, list) and bool(value))
_MAP = Expected("an object", is_object)
_EXCLUSIVE = Expected("a number", lambda value: is_number(value) or isinstance(value, bool))  # a boolean in draft 4

EXPECTED: Final[Mapping[str, Expected]] = {
    "$ref": _STRING,
    "additionalItems": _SCHEMA,
    "additionalProperties": _SCHEMA,
    "enum": Expected("an array, not empty", lambda value: isinstance(value, list) and bool(value)),
    "exclusiveMaximum": _EXCLUSIVE,
    "exclusiveMinimum": _EXCLUSIVE,
    "format": _STRING,
    "items": Expected("a schema", lambda value: is_schema(value) or isinstance(value, list)),  # a list before 2020-12
    "maximum": _NUMBER,
    "minimum": _NUMBER,
    "multipleOf": Expected("a number above 0", lambda value: isinstance(value, int | float) and value > 0),
    "pattern": _STRING,
    "required": Expected("an array of strings", is_string_list),
    "x-guidance": Expected("nothing: it is not supported", lambda value: value == ONE_LINE),
    "type": Expected("a type or an array of types", lambda value: isinstance(value, str) or is_string_list(value)),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), _COUNT),
    **dict.fromkeys(("$defs", "definitions", "patternProperties", "properties"), _MAP),
}

AT_MOST: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
)
"""Pairs of which the first may not be the larger."""

LESS: Final = (
    ("exclusiveMinimum", "maximum"),
    ("minimum", "exclusiveMaximum"),
    ("exclusiveMinimum", "exclusiveMaximum"),
)
"""Pairs of which the first must be the smaller."""
