"""The keywords of JSON Schema: where schemas are inside a schema, what references of the normal form lead to, and which
values each keyword can have.

Keywords of all drafts from 4 to 2020-12 are known. Unknown keywords are annotations, by the standard.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeGuard

import msgspec

from motet.errors import GrammarError
from motet.grammar.limits import MAX_NESTING, MAX_OPTIONAL, MAX_TEXT_CHARS

TYPES: Final = frozenset(["array", "boolean", "integer", "null", "number", "object", "string"])
SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMAS: Final = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords with one schema. `items` can also have a list, and `dependencies` has schemas and lists of names."""
DEFINITIONS: Final = ("$defs", "definitions")
NOT_ENFORCED: Final = frozenset(["disallow", "divisibleBy", "extends"])
"""Constraints of draft 3 that later drafts do not have."""
ONE_LINE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only allowed value of `x-guidance`, a keyword with options for llguidance. Formats of tool calls use it."""
NARROWED: Final = "x-narrowed"
"""Key of a schema in the normal form that does not allow all values that the client's schema allows."""
ELSEWHERE: Final = "$"
"""First step in the name of a definition of the normal form that is somewhere else in the client's schema."""
OPEN: Final = "x-open"
"""Key of a closed schema under which it has the schema before its objects were closed. It decides whether the parts of
`oneOf` exclude one another, because the standard knows only this schema."""
PREFIX: Final = "#/$defs/"
"""Start of the references of the normal form, except `#`, the reference to the whole schema."""
TOO_DEEP: Final = f"the schema is nested deeper than {MAX_NESTING} levels"

Path = tuple[str | int, ...]
Schema = dict[str, object]


class SchemaPath(NamedTuple):
    """A schema inside another schema, or a value in the place of a schema, with its path."""

    path: Path
    schema: object


def schema_error(path: Path, message: str) -> GrammarError:
    """Returns an error that names the place, such as `at properties.a.anyOf[0]: <message>`."""
    if path[:1] == ("$defs",) and len(path) > 1 and str(path[1]).startswith(f"{ELSEWHERE}."):
        path = (*(int(step) if step.isdecimal() else step for step in str(path[1]).split(".")[1:]), *path[2:])
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return GrammarError(f"at {text.removeprefix('.') or 'the top'}: {message}")


def inner_schemas(schema: object) -> Iterator[SchemaPath]:
    """Yields the schemas one level below `schema`, in order, with paths relative to it. Only an object has any."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if isinstance(value, list) and (key in SCHEMA_LISTS or key == "items"):
            yield from (SchemaPath((key, number), inner) for number, inner in enumerate(value))
        elif isinstance(value, dict) and key in SCHEMA_MAPS:
            yield from (SchemaPath((key, name), inner) for name, inner in value.items())
        elif isinstance(value, dict) and key == "dependencies":
            yield from (SchemaPath((key, name), each) for name, each in value.items() if not isinstance(each, list))
        elif key in SCHEMAS:
            yield SchemaPath((key,), value)


def all_schemas(root: Schema) -> list[SchemaPath]:
    """Returns all schemas inside a schema, with their paths, each object once."""
    waiting, found, visited = [SchemaPath((), root)], [], set[int]()
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in visited:
            visited.add(id(schema))
            found.append(SchemaPath(path, schema))
            waiting += reversed([SchemaPath((*path, *each.path), each.schema) for each in inner_schemas(schema)])
    return found


def target_of(ref: str, root: Mapping[str, object]) -> object:
    """Returns the schema that a reference of the normal form leads to."""
    return root if ref == "#" else dict_at(root, "$defs")[ref.removeprefix(PREFIX)]


def resolved(schema: object, root: Mapping[str, object]) -> object:
    """Returns the schema that a schema with nothing but a reference leads to, through further such schemas. Returns
    True if they refer to one another in a circle, which allows every value."""
    visited = set[int]()
    while isinstance(schema, dict) and schema.keys() == {"$ref"}:
        if id(schema) in visited:
            return True
        visited.add(id(schema))
        schema = target_of(str(schema["$ref"]), root)
    return schema


def check_nesting(root: object) -> None:
    """Raises `GrammarError` if arrays and objects are nested more than `MAX_NESTING` levels deep, in any place."""
    level: list[tuple[Path, object]] = [((), root)]
    for _ in range(MAX_NESTING):
        level = [((*path, key), inner) for path, value in level for key, inner in _members(value)]
    if level:
        raise schema_error(level[0][0][:6], TOO_DEEP)


def _members(value: object) -> list[tuple[str | int, object]]:
    """Returns the arrays and objects directly in an array or object."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(key, inner) for key, inner in pairs if isinstance(inner, dict | list)]


def check_keywords(path: Path, schema: Mapping[str, object]) -> None:
    """Checks the values of the keywords of one schema, but not the schemas inside it. Raises `GrammarError` for a value
    of a wrong type, bounds that contradict each other, and strings or objects over a limit."""
    for key, value in schema.items():
        if key in NOT_ENFORCED:
            raise schema_error((*path, key), f"the keyword '{key}' is not supported")
        if key in EXPECTED:
            expected, is_valid = EXPECTED[key]
            if not is_valid(value):
                raise schema_error((*path, key), f"expected {expected}, got {shortened(value)}")
        if key in WITH_NUMBERS and _has_infinite(value):
            raise schema_error((*path, key), "a number is greater than a 64-bit float can be")
    if ("additionalItems" in schema or isinstance(schema.get("items"), list)) and "prefixItems" in schema:
        message = "'prefixItems' cannot be combined with 'additionalItems' or with an array in 'items'"
        raise schema_error((*path, "prefixItems"), message)
    _check_names(path, schema)
    _check_bounds(path, schema)


def _check_names(path: Path, schema: Mapping[str, object]) -> None:
    """Checks the names of types, and the lengths of strings."""
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if name not in TYPES:
            raise schema_error((*path, "type"), f"'{name}' is not a type; the types are {', '.join(sorted(TYPES))}")
    if schema.get("type") == []:
        raise schema_error((*path, "type"), "the array of types is empty, so no value is valid")
    names = [name for key in ("properties", "patternProperties") for name in dict_at(schema, key)]
    for text in (schema.get("pattern"), schema.get("const"), *list_at(schema, "enum"), *names):
        if isinstance(text, str) and len(text) > MAX_TEXT_CHARS:
            raise schema_error(path, f"a string has {len(text)} characters; at most {MAX_TEXT_CHARS} are allowed")
    for pattern, value in dict_at(schema, "patternProperties").items():
        if value is False:  # llguidance would allow the start of such a key, which could then never end
            raise schema_error((*path, "patternProperties", pattern), "forbidden keys are not supported")


def _check_bounds(path: Path, schema: Mapping[str, object]) -> None:
    for minimum, maximum in BOUNDS:
        low, high = schema.get(minimum), schema.get(maximum)
        if not (is_number(low) and is_number(high)):
            continue
        if low > high:
            message = f"'{minimum}' {low} is greater than '{maximum}' {high}, so no value is valid"
            raise schema_error((*path, minimum), message)
        if low == high and "exclusive" in minimum + maximum:
            raise schema_error((*path, minimum), f"'{minimum}' and '{maximum}' are both {low}, so no value is valid")
    optional = dict_at(schema, "properties").keys() - set(list_at(schema, "required"))
    if len(optional) > MAX_OPTIONAL:
        message = f"{len(optional)} properties are not required; at most {MAX_OPTIONAL} such properties are allowed"
        raise schema_error((*path, "properties"), message)


def dict_at(schema: Mapping[str, object], key: str) -> Schema:
    """Returns the object under `key`; an empty object for any other value."""
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def list_at(schema: Mapping[str, object], key: str) -> list[object]:
    """Returns the array under `key`; an empty array for any other value."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def types_of(schema: Mapping[str, object]) -> frozenset[str]:
    """Returns the types that the keyword `type` allows. A schema that allows numbers allows integers."""
    named = schema.get("type", list(TYPES))
    names = frozenset(named if isinstance(named, list) else [str(named)])
    return names | {"integer"} if "number" in names else names


def is_any(schema: object) -> bool:
    """Returns True for the schemas that allow every value and have no keywords."""
    return schema is True or schema == {}


def shortened(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_infinite(value: object) -> bool:
    """Returns True for a number that is not finite as a float, and for an array or object with one."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if is_number(each) and not -sys.float_info.max <= each <= sys.float_info.max:
            return True
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return False


def _is_string_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_filled(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _is_names_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_string_list, value.values()))


_COUNTS: Final = (
    *("maxContains", "maxItems", "maxLength", "maxProperties"),
    *("minContains", "minItems", "minLength", "minProperties"),
)
_EXPECTATIONS: Final[Sequence[tuple[str, Callable[[object], bool], Sequence[str]]]] = (
    ("a string", lambda value: isinstance(value, str), ("$dynamicRef", "$recursiveRef", "$ref", "format", "pattern")),
    ("a string", lambda value: isinstance(value, str), ("$anchor", "$dynamicAnchor", "$id", "$schema")),
    ("a number", is_number, ("maximum", "minimum")),
    # A boolean is allowed too: it is the form of draft 4.
    ("a number", lambda value: isinstance(value, int | float), ("exclusiveMaximum", "exclusiveMinimum")),
    ("a number greater than 0", lambda value: is_number(value) and value > 0, ("multipleOf",)),
    ("an integer of 0 or more", lambda value: type(value) is int and value >= 0, _COUNTS),
    ("a boolean", lambda value: isinstance(value, bool), ("uniqueItems",)),
    ("a non-empty array", _is_filled, ("enum",)),
    ("an array of strings", _is_string_list, ("required",)),
    ("an object with arrays of strings", _is_names_by_name, ("dependentRequired",)),
    ("a type or an array of types", lambda value: isinstance(value, str) or _is_string_list(value), ("type",)),
    ("a schema (an object or a boolean)", _is_schema, [key for key in SCHEMAS if key != "items"]),
    ("a schema", lambda value: isinstance(value, dict | bool | list), ("items",)),  # a list before 2020-12
    ("a non-empty array of schemas", _is_filled, SCHEMA_LISTS),
    ("an object", lambda value: isinstance(value, dict), (*SCHEMA_MAPS, "dependencies")),
    ("no value, because this keyword is not supported", lambda value: value == ONE_LINE, ("x-guidance",)),
)
"""Description, check and keywords of each kind of value."""
WITH_NUMBERS: Final = frozenset(
    [*_COUNTS, "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"]
)
"""Keywords whose values have numbers."""
EXPECTED: Final = {keyword: (text, is_valid) for text, is_valid, keywords in _EXPECTATIONS for keyword in keywords}
"""Description and check of the value of each keyword."""

BOUNDS: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
    ("exclusiveMinimum", "maximum"),
    ("minimum", "exclusiveMaximum"),
    ("exclusiveMinimum", "exclusiveMaximum"),
)
"""Pairs of keywords for bounds. The first number must not be greater than the second; if one of the bounds is
exclusive, it must be smaller."""
