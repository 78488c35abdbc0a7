"""Checks a client's JSON Schema by a walk of our own before llguidance compiles it.

The walk knows the place, so its errors say where a schema is wrong. It refuses constraints that llguidance would ignore
in silence (a schema must not promise what is not enforced), and limits depth and width. Names that no draft knows are
annotations by the standard, and are ignored as titles and descriptions are.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Final, NamedTuple, TypeGuard

import msgspec

from motet.errors import GrammarError
from motet.grammar.limits import MAX_DECIMALS, MAX_LEVELS, MAX_MULTIPLES, MAX_NESTING, MAX_OPTIONAL, MAX_TEXT_CHARS

FORMATS: Final = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
TYPES: Final = frozenset(["array", "boolean", "integer", "null", "number", "object", "string"])
NOT_ENFORCED: Final = frozenset(
    [
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
    ]
)
"""Constraints that llguidance does not enforce."""

ONE_LINE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only allowed value of `x-guidance`, which tells llguidance how to compile; formats of tool calls use it."""

SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_DEFS = ("$defs", "definitions")

Path = tuple[str | int, ...]


class SchemaPath(NamedTuple):
    """A schema inside a schema, or a value where one should be."""

    path: Path
    schema: object


def wrong(path: Path, what: str) -> GrammarError:
    """Returns an error with the place, such as `properties.a.anyOf[0]`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return GrammarError(f"at {text.removeprefix('.') or 'the top'}: {what}")


def check_schema(
    root: Mapping[str, object], multiples: "Multiples | None" = None
) -> tuple[list[dict[str, object]], Mapping[str, object]]:
    """Returns all schemas in `root`, each once, and the schema of each reference.

    `multiples` has counted the other schemas of the same grammar. Raises `GrammarError` for a schema that cannot be
    enforced, has a wrong type in it, contradicts itself, or is too much work.
    """
    _check_nesting(root)
    waiting, seen = [SchemaPath((), root)], {id(root)}
    schemas: list[tuple[Path, dict[str, object]]] = []
    refs: dict[str, object] = {}
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise wrong(path, "expected a schema (an object or a boolean)")
        _check_keywords(path, schema)
        _check_values(path, schema)
        _check_bounds(path, schema)
        schemas.append((path, schema))
        below = [SchemaPath((*path, *inner.path), inner.schema) for inner in inner_schemas(schema)]
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in refs:
            below.append(target(path, root, ref=ref))
            refs[ref] = below[-1].schema
        waiting.extend(place for place in reversed(below) if id(place.schema) not in seen)
        seen.update(id(place.schema) for place in below if isinstance(place.schema, dict))
    _check_levels(root, refs)
    (multiples or Multiples()).add(schemas, refs)
    return [schema for _, schema in schemas], refs


def inner_schemas(schema: object) -> Iterator[SchemaPath]:
    """Yields the schemas one level below, in order; their paths begin at `schema`. Values of a wrong type have none."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if isinstance(value, list) and (key in SCHEMA_LISTS or key == "items"):
            yield from (SchemaPath((key, number), inner) for number, inner in enumerate(value))
        elif isinstance(value, dict) and key in SCHEMA_MAPS:
            yield from (SchemaPath((key, name), inner) for name, inner in value.items())
        elif key in ("items", "additionalItems", "additionalProperties"):
            yield SchemaPath((key,), value)


def _check_nesting(root: object) -> None:
    """Raises for more than `MAX_NESTING` arrays and objects inside one another, in any place."""
    level: list[tuple[Path, object]] = [((), root)]
    for _ in range(MAX_NESTING):
        level = [((*path, key), inner) for path, value in level for key, inner in _members(value)]
    if level:
        raise wrong(level[0][0][:6], f"the schema goes deeper than {MAX_NESTING} levels here")


def _members(value: object) -> list[tuple[str | int, object]]:
    """Returns the arrays and objects in an array or object."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(key, inner) for key, inner in pairs if isinstance(inner, dict | list)]


def _check_levels(root: object, refs: Mapping[str, object]) -> None:
    levels = len(refs) if len(refs) > MAX_LEVELS else sum(map(_depth, (root, *refs.values())))
    if levels > MAX_LEVELS:
        raise GrammarError(
            f"it and the {len(refs)} parts that it refers to are {levels} levels deep together, or more; at most "
            f"{MAX_LEVELS} are allowed"
        )


def _check_keywords(path: Path, schema: Mapping[str, object]) -> None:
    for key, value in schema.items():
        if key in NOT_ENFORCED:
            raise wrong((*path, key), f"the keyword '{key}' is not supported")
        if key in EXPECTED:
            what, holds = EXPECTED[key]
            if not holds(value):
                raise wrong((*path, key), f"expected {what}, got {_shown(value)}")
    old_items = "additionalItems" in schema or isinstance(schema.get("items"), list)
    if old_items and "prefixItems" in schema:
        raise wrong((*path, "prefixItems"), "it cannot be used with 'additionalItems', or 'items' that is an array")


def _check_values(path: Path, schema: Mapping[str, object]) -> None:
    """Checks keywords whose values are names, and the length of texts."""
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if name not in TYPES:
            raise wrong((*path, "type"), f"'{name}' is not a type; {', '.join(sorted(TYPES))} are")
    if types == [] and "type" in schema:
        raise wrong((*path, "type"), "the array of types is empty: nothing could be written")
    named = schema.get("format")
    if named is not None and named not in FORMATS:
        raise wrong((*path, "format"), f"the format '{named}' is not supported; {', '.join(sorted(FORMATS))} are")
    names = [name for key in ("properties", "patternProperties") for name in _map(schema, key)]
    for text in (schema.get("pattern"), schema.get("const"), *_list(schema, "enum"), *names):
        if isinstance(text, str) and len(text) > MAX_TEXT_CHARS:
            raise wrong(path, f"a string has {len(text)} characters, and {MAX_TEXT_CHARS} are allowed")
    for pattern, value in _map(schema, "patternProperties").items():
        if value is False:  # llguidance would let such a key begin, and never end
            raise wrong((*path, "patternProperties", pattern), "keys that may not be written are not supported")


def _check_bounds(path: Path, schema: Mapping[str, object]) -> None:
    for least, most in BOUNDS:
        low, high = schema.get(least), schema.get(most)
        if not (is_number(low) and is_number(high)):
            continue
        if low > high:
            raise wrong((*path, least), f"'{least}' {low} is more than '{most}' {high}: nothing could be written")
        if low == high and "exclusive" in least + most:
            raise wrong((*path, least), f"'{least}' is '{most}', {low}: nothing could be written")
    optional = _map(schema, "properties").keys() - set(_list(schema, "required"))
    if len(optional) > MAX_OPTIONAL:
        raise wrong(
            (*path, "properties"),
            f"{len(optional)} properties are not required, and at most {MAX_OPTIONAL} such properties are allowed",
        )


def _map(schema: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _list(schema: Mapping[str, object], key: str) -> list[object]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def target(path: Path, root: object, *, ref: str) -> SchemaPath:
    """Finds the schema of a reference as llguidance does, which uses the steps as they are written."""
    if ref != "#" and not ref.startswith("#/"):
        raise wrong((*path, "$ref"), f"'{ref}' is not supported; only references into this schema are, as '#/$defs/a'")
    steps: list[str | int] = []
    found = root
    for step in ref.split("/")[1:] if ref not in ("#", "#/") else []:
        if isinstance(found, dict) and step in found:
            steps.append(step)
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            steps.append(int(step))
            found = found[int(step)]
        else:
            raise wrong((*path, "$ref"), f"'{ref}' does not exist: there is no '{step}'")
    if not isinstance(found, dict | bool):
        raise wrong((*path, "$ref"), f"'{ref}' is not a schema")
    return SchemaPath(tuple(steps), found)


def _depth(value: object) -> int:
    """Counts schemas inside one another, without following references."""
    depth, level = 0, [value]
    while level:
        level = [inner.schema for schema in level for inner in inner_schemas(schema) if inner.path[0] not in _DEFS]
        depth += 1
    return depth


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


class Multiples:
    """Adds up the work for `multipleOf` in all schemas of one grammar, and refuses too much of it.

    A number costs one state for each remainder, without regard to its decimal point. Numbers that may apply to the
    same value (through `allOf`, `anyOf`, `oneOf`, `$ref`) cost their least common multiple. Equal ones count once.
    """

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        """Number of states -> number of values that need this many."""
        self._total = 0
        """The sum of the different numbers of states."""

    def add(self, schemas: Sequence[tuple[Path, Mapping[str, object]]], refs: Mapping[str, object]) -> None:
        """Raises `GrammarError` for the number at which it becomes too much."""
        given = [
            ((*path, "multipleOf"), schema, _in_last_places(path, schema["multipleOf"]))
            for path, schema in schemas
            if "multipleOf" in schema
        ]
        group_of = _same_value(schemas, refs) if given else {}
        common: dict[int, int] = {}
        for path, schema, number in given:
            group = group_of[id(schema)]
            if (before := common.get(group)) is not None:
                self._count(before, -1)
                number = math.lcm(before, number)
            common[group] = number
            self._count(number, 1)
            if self._total > MAX_MULTIPLES:
                raise wrong(
                    path,
                    f"together with those before it, it makes {self._total}, and at most {MAX_MULTIPLES} is allowed "
                    "(those for the same value count with their least common multiple)",
                )

    def _count(self, number: int, change: int) -> None:
        states = _without_point(number)
        was_used = self._uses[states] > 0
        self._uses[states] += change
        self._total += states * ((self._uses[states] > 0) - was_used)


def _in_last_places(path: Path, value: object) -> int:
    """Returns a number as a multiple of 10 to the power of -MAX_DECIMALS. Raises `GrammarError` for too much work."""
    scaled = Decimal(repr(value)).scaleb(MAX_DECIMALS)
    if scaled != int(scaled) or _without_point(int(scaled)) > MAX_MULTIPLES:
        raise wrong(
            (*path, "multipleOf"),
            f"{value} is too much work: without its decimal point it may be at most {MAX_MULTIPLES}, with up to "
            f"{MAX_DECIMALS} places behind the point",
        )
    return int(scaled)


def _without_point(number: int) -> int:
    """Takes off the zeros at the end of the decimal places."""
    for _ in range(MAX_DECIMALS):
        if number % 10:
            break
        number //= 10
    return number


def _same_value(schemas: Sequence[tuple[Path, Mapping[str, object]]], refs: Mapping[str, object]) -> dict[int, int]:
    """Maps the id of each schema to the id of one schema for all that may apply to the same value."""
    leader = {id(schema): id(schema) for _, schema in schemas}

    def lead(schema: int) -> int:
        while leader[schema] != schema:
            leader[schema] = schema = leader[leader[schema]]
        return schema

    for _, schema in schemas:
        parts = [refs.get(str(schema.get("$ref")))]
        for key in ("allOf", "anyOf", "oneOf"):
            parts += _list(schema, key)
        for part in parts:
            if isinstance(part, dict):
                leader[lead(id(part))] = lead(id(schema))
    return {schema: lead(schema) for schema in leader}


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_string_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_filled(value: object) -> bool:
    return isinstance(value, list) and bool(value)


_COUNTS: Final = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_EXPECTATIONS: Final[Sequence[tuple[str, Callable[[object], bool], Sequence[str]]]] = (
    ("a string", lambda value: isinstance(value, str), ("$ref", "format", "pattern")),
    ("a number", is_number, ("maximum", "minimum")),
    # Booleans in draft 4.
    ("a number", lambda value: isinstance(value, int | float), ("exclusiveMaximum", "exclusiveMinimum")),
    ("a number above 0", lambda value: is_number(value) and value > 0, ("multipleOf",)),
    ("an integer of 0 or more", lambda value: type(value) is int and value >= 0, _COUNTS),
    ("an array, not empty", _is_filled, ("enum",)),
    ("an array of strings", _is_string_list, ("required",)),
    ("a type or an array of types", lambda value: isinstance(value, str) or _is_string_list(value), ("type",)),
    (
        "a schema (an object or a boolean)",
        lambda value: isinstance(value, dict | bool),
        ("additionalItems", "additionalProperties"),
    ),
    ("a schema", lambda value: isinstance(value, dict | bool | list), ("items",)),  # a list before 2020-12
    ("an array of schemas, not empty", _is_filled, SCHEMA_LISTS),
    ("an object", lambda value: isinstance(value, dict), SCHEMA_MAPS),
    ("nothing: it is not supported", lambda value: value == ONE_LINE, ("x-guidance",)),
)
"""The allowed values of keywords, in words and as a check."""
EXPECTED: Final = {keyword: (what, holds) for what, holds, keywords in _EXPECTATIONS for keyword in keywords}

BOUNDS: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
    ("exclusiveMinimum", "maximum"),
    ("minimum", "exclusiveMaximum"),
    ("exclusiveMinimum", "exclusiveMaximum"),
)
"""Pairs of keywords: the first number may not be larger, and with an exclusive bound it must be smaller."""
