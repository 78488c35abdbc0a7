"""Checks a client's JSON Schema before llguidance compiles it.

1. `check_schema` walks over all schemas inside the schema and all schemas that it refers to.
2. At each schema it checks the types of the keywords, their values, and bounds that contradict each other.
3. It limits depth, width and the work for `multipleOf`.

The walk knows the path of each schema, so its errors name the place. It rejects constraints that llguidance would
silently ignore, because the schema would promise what is not enforced. According to the standard, unknown keywords are
annotations; they are ignored like titles and descriptions.
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
NOT_ENFORCED: Final = (
    frozenset(["$dynamicRef", "$recursiveRef", "disallow", "divisibleBy", "extends"])  # the last three: draft 3
    | frozenset(["dependencies", "dependentRequired", "dependentSchemas", "else", "if", "not", "then"])
    | frozenset(["contains", "maxContains", "minContains", "unevaluatedItems", "uniqueItems"])
    | frozenset(["propertyNames", "unevaluatedProperties"])
)
"""Keywords of constraints that llguidance does not enforce."""
ONE_LINE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only allowed value of `x-guidance`, a keyword with options for llguidance. Formats of tool calls use it."""
SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
TOO_DEEP: Final = f"the schema is nested deeper than {MAX_NESTING} levels"
_DEFS = ("$defs", "definitions")
Path = tuple[str | int, ...]


class SchemaPath(NamedTuple):
    """A schema inside another schema, or a value in the place of a schema, with its path."""

    path: Path
    schema: object


def schema_error(path: Path, message: str) -> GrammarError:
    """Returns an error that names the place, such as `at properties.a.anyOf[0]: <message>`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return GrammarError(f"at {text.removeprefix('.') or 'the top'}: {message}")


def check_schema(
    root: Mapping[str, object], multiples: "Multiples | None" = None
) -> tuple[list[dict[str, object]], Mapping[str, object]]:
    """Returns all schemas in `root`, each once, and the schema of each reference. Raises `GrammarError` for a schema
    that cannot be enforced, has a value of a wrong type, contradicts itself, or exceeds a limit. `multiples` has
    counted the other schemas of the same grammar."""
    _check_nesting(root)
    waiting, visited = [SchemaPath((), root)], {id(root)}
    schemas: list[tuple[Path, dict[str, object]]] = []
    refs: dict[str, object] = {}
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise schema_error(path, "expected a schema (an object or a boolean)")
        _check_keywords(path, schema)
        _check_values(path, schema)
        _check_bounds(path, schema)
        schemas.append((path, schema))
        found = [SchemaPath((*path, *inner.path), inner.schema) for inner in inner_schemas(schema)]
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in refs:
            found.append(resolve_ref(path, root, ref=ref))
            refs[ref] = found[-1].schema
        waiting.extend(inner for inner in reversed(found) if id(inner.schema) not in visited)
        visited.update(id(inner.schema) for inner in found if isinstance(inner.schema, dict))
    _check_levels(root, refs)
    (multiples or Multiples()).add(schemas, refs)
    return [schema for _, schema in schemas], refs


def inner_schemas(schema: object) -> Iterator[SchemaPath]:
    """Yields the schemas one level below `schema`, in order, with paths relative to it. Only an object has any."""
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


def _check_levels(root: object, refs: Mapping[str, object]) -> None:
    levels = len(refs) if len(refs) > MAX_LEVELS else sum(map(_depth, (root, *refs.values())))
    if levels > MAX_LEVELS:
        raise GrammarError(
            f"the depths of the schema and of the {len(refs)} schemas that it refers to add up to at least {levels} "
            f"levels; at most {MAX_LEVELS} are allowed"
        )


def _check_keywords(path: Path, schema: Mapping[str, object]) -> None:
    for key, value in schema.items():
        if key in NOT_ENFORCED:
            raise schema_error((*path, key), f"the keyword '{key}' is not supported")
        if key in EXPECTED:
            expected, is_valid = EXPECTED[key]
            if not is_valid(value):
                raise schema_error((*path, key), f"expected {expected}, got {_shortened(value)}")
    old_items = "additionalItems" in schema or isinstance(schema.get("items"), list)
    if old_items and "prefixItems" in schema:
        message = "'prefixItems' cannot be combined with 'additionalItems' or with an array in 'items'"
        raise schema_error((*path, "prefixItems"), message)


def _check_values(path: Path, schema: Mapping[str, object]) -> None:
    """Checks keywords whose values are names, and the lengths of strings."""
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if name not in TYPES:
            raise schema_error((*path, "type"), f"'{name}' is not a type; the types are {', '.join(sorted(TYPES))}")
    if schema.get("type") == []:
        raise schema_error((*path, "type"), "the array of types is empty, so no value is valid")
    named = schema.get("format")
    if named is not None and named not in FORMATS:
        supported = ", ".join(sorted(FORMATS))
        raise schema_error((*path, "format"), f"the format '{named}' is not supported; use one of {supported}")
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


def dict_at(schema: Mapping[str, object], key: str) -> dict[str, object]:
    """Returns the object under `key`; an empty object for any other value."""
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def list_at(schema: Mapping[str, object], key: str) -> list[object]:
    """Returns the array under `key`; an empty array for any other value."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def resolve_ref(path: Path, root: object, *, ref: str) -> SchemaPath:
    """Returns the schema that `ref` refers to. Like llguidance, uses the steps of the reference without unescaping."""
    if ref != "#" and not ref.startswith("#/"):
        message = f"'{ref}' is not supported; only references into this schema are supported, such as '#/$defs/a'"
        raise schema_error((*path, "$ref"), message)
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
            raise schema_error((*path, "$ref"), f"'{ref}' does not exist: there is no '{step}'")
    if not isinstance(found, dict | bool):
        raise schema_error((*path, "$ref"), f"'{ref}' is not a schema")
    return SchemaPath(tuple(steps), found)


def _depth(value: object) -> int:
    """Returns the number of levels of nested schemas, without following references."""
    depth, level = 0, [value]
    while level:
        level = [inner.schema for schema in level for inner in inner_schemas(schema) if inner.path[0] not in _DEFS]
        depth += 1
    return depth


def _shortened(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


class Multiples:
    """Adds up the work for `multipleOf` in all schemas of one grammar, and limits it to `MAX_MULTIPLES`. A number costs
    one state for each remainder; its decimal point is ignored. Numbers that can apply to the same value (through
    `allOf`, `anyOf`, `oneOf`, `$ref`) cost their least common multiple. Equal costs count once."""

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        """Number of values for each number of states."""
        self._total = 0
        """Sum of the different numbers of states."""

    def add(self, schemas: Sequence[tuple[Path, Mapping[str, object]]], refs: Mapping[str, object]) -> None:
        """Counts the schemas of one root. Raises `GrammarError` at the number that exceeds the limit."""
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
                raise schema_error(
                    path,
                    f"the sum of this 'multipleOf' and the preceding ones is {self._total}; at most {MAX_MULTIPLES} is "
                    "allowed (for numbers that apply to the same value, their least common multiple counts)",
                )

    def _count(self, number: int, change: int) -> None:
        states = _without_point(number)
        was_used = self._uses[states] > 0
        self._uses[states] += change
        self._total += states * ((self._uses[states] > 0) - was_used)


def _in_last_places(path: Path, value: object) -> int:
    """Returns a number as a multiple of 10 to the power of -MAX_DECIMALS. Raises `GrammarError` if the number exceeds
    the limit by itself."""
    scaled = Decimal(repr(value)).scaleb(MAX_DECIMALS)
    if scaled != int(scaled) or _without_point(int(scaled)) > MAX_MULTIPLES:
        raise schema_error(
            (*path, "multipleOf"),
            f"{value} is too much work: without its decimal point it must be at most {MAX_MULTIPLES}, and it can have "
            f"at most {MAX_DECIMALS} decimal places",
        )
    return int(scaled)


def _without_point(number: int) -> int:
    """Removes up to `MAX_DECIMALS` zeros from the end of a number: the unused decimal places."""
    for _ in range(MAX_DECIMALS):
        if number % 10:
            break
        number //= 10
    return number


def _same_value(schemas: Sequence[tuple[Path, Mapping[str, object]]], refs: Mapping[str, object]) -> dict[int, int]:
    """Maps the id of each schema to the id of one of the schemas that can apply to the same value (union-find)."""
    parent = {id(schema): id(schema) for _, schema in schemas}

    def representative(schema: int) -> int:
        while parent[schema] != schema:
            parent[schema] = schema = parent[parent[schema]]
        return schema

    for _, schema in schemas:
        parts = [refs.get(str(schema.get("$ref")))]
        for key in ("allOf", "anyOf", "oneOf"):
            parts += list_at(schema, key)
        for part in parts:
            if isinstance(part, dict):
                parent[representative(id(part))] = representative(id(schema))
    return {schema: representative(schema) for schema in parent}


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
    # A boolean is allowed too: it is the form of draft 4.
    ("a number", lambda value: isinstance(value, int | float), ("exclusiveMaximum", "exclusiveMinimum")),
    ("a number greater than 0", lambda value: is_number(value) and value > 0, ("multipleOf",)),
    ("an integer of 0 or more", lambda value: type(value) is int and value >= 0, _COUNTS),
    ("a non-empty array", _is_filled, ("enum",)),
    ("an array of strings", _is_string_list, ("required",)),
    ("a type or an array of types", lambda value: isinstance(value, str) or _is_string_list(value), ("type",)),
    (
        "a schema (an object or a boolean)",
        lambda value: isinstance(value, dict | bool),
        ("additionalItems", "additionalProperties"),
    ),
    ("a schema", lambda value: isinstance(value, dict | bool | list), ("items",)),  # a list before 2020-12
    ("a non-empty array of schemas", _is_filled, SCHEMA_LISTS),
    ("an object", lambda value: isinstance(value, dict), SCHEMA_MAPS),
    ("no value, because this keyword is not supported", lambda value: value == ONE_LINE, ("x-guidance",)),
)
"""Description, check and keywords of each kind of value."""
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
