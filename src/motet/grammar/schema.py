"""A client's JSON Schema, checked by our own walk before llguidance compiles it.

The walk knows where it is, so it says where a schema is wrong; it refuses constraints that llguidance would pass over
in silence (a schema must not promise what is not enforced), and bounds what would be too deep or too wide to compile.
What llguidance understands wrongly is rewritten (`mend`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from motet.errors import GrammarError
from motet.grammar.keywords import (
    AT_MOST,
    EXPECTED,
    FORMATS,
    LESS,
    NOT_ENFORCED,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    TYPES,
    is_number,
    is_schema,
)
from motet.grammar.limits import MAX_LEVELS, MAX_NESTING, MAX_OPTIONAL, MAX_SOURCE_CHARS, MAX_TEXT_CHARS
from motet.grammar.mend import mend

Path = tuple[str | int, ...]


class Place(NamedTuple):
    """A schema inside a schema."""

    path: Path
    schema: object


def read_schema(source: str) -> Mapping[str, object]:
    """A JSON Schema that llguidance may see. Raises `GrammarError`, with the path to what is wrong."""
    if len(source) > MAX_SOURCE_CHARS:
        raise GrammarError(f"it has {len(source)} characters, and {MAX_SOURCE_CHARS} are allowed")
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise GrammarError(f"it is not JSON, or nested too deeply: {exc}") from exc
    if not isinstance(schema, dict):
        raise GrammarError("it must be an object")
    check_nesting(schema)
    schemas, targets = check_schema(schema)
    for inner in schemas:
        mend(inner, targets)
    return {key: value for key, value in schema.items() if key != "$schema"}


def show(path: Path) -> str:
    """`properties.a.anyOf[0]`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "the top"


def wrong(path: Path, what: str) -> GrammarError:
    return GrammarError(f"at {show(path)}: {what}")


def inner_schemas(schema: object) -> Iterator[Place]:
    """The schemas one level below, in the order in which they stand; their paths begin at `schema`."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in SCHEMA_LISTS or (key == "items" and isinstance(value, list)):
            yield from (Place((key, number), inner) for number, inner in enumerate(value))
        elif key in SCHEMA_MAPS:
            yield from (Place((key, name), inner) for name, inner in value.items())
        elif key in ("items", "additionalItems", "additionalProperties"):
            yield Place((key,), value)


def check_nesting(value: object) -> None:
    """Raises for more than `MAX_NESTING` arrays and objects inside one another, wherever they stand."""
    level: list[Place] = [Place((), value)]
    for _ in range(MAX_NESTING):
        level = [inner for place in level for inner in _values_in(place)]
    if level:
        raise wrong(level[0].path[:6], f"the schema goes deeper than {MAX_NESTING} levels here")


def _values_in(place: Place) -> Iterator[Place]:
    pairs: Iterable[tuple[str | int, object]] = ()
    if isinstance(place.schema, dict):
        pairs = place.schema.items()
    elif isinstance(place.schema, list):
        pairs = enumerate(place.schema)
    return (Place((*place.path, key), value) for key, value in pairs if isinstance(value, dict | list))


def check_schema(root: Mapping[str, object]) -> tuple[list[dict[str, object]], Mapping[str, object]]:
    """All schemas in it, each once, and what each reference points to. Raises for what cannot be enforced, has the
    wrong type, or contradicts itself; and for too much of it."""
    waiting, seen = [Place((), root)], {id(root)}
    schemas: list[dict[str, object]] = []
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
        schemas.append(schema)
        below = [Place((*path, *inner.path), inner.schema) for inner in inner_schemas(schema)]
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in refs:
            below.append(_target(path, root, ref))
            refs[ref] = below[-1].schema
        waiting.extend(place for place in reversed(below) if id(place.schema) not in seen)
        seen.update(id(place.schema) for place in below if isinstance(place.schema, dict))
    _check_levels(root, refs)
    return schemas, refs


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
        expected = EXPECTED.get(key)
        if expected is not None and not expected.holds(value):
            raise wrong((*path, key), f"expected {expected.what}, got {_shown(value)}")
    old_items = "additionalItems" in schema or isinstance(schema.get("items"), list)
    if old_items and "prefixItems" in schema:
        raise wrong((*path, "prefixItems"), "it cannot stand beside 'additionalItems', or 'items' that is an array")


def _check_values(path: Path, schema: Mapping[str, object]) -> None:
    """Keywords whose values are names, and texts that are too long."""
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if name not in TYPES:
            raise wrong((*path, "type"), f"'{name}' is no type; {', '.join(sorted(TYPES))} are")
    if types == [] and "type" in schema:
        raise wrong((*path, "type"), "the array of types is empty: nothing could be written")
    named = schema.get("format")
    if named is not None and named not in FORMATS:
        raise wrong((*path, "format"), f"the format '{named}' is not supported; {', '.join(sorted(FORMATS))} are")
    enum = schema.get("enum", [])
    names = [name for key in ("properties", "patternProperties") for name in _map(schema, key)]
    for text in (schema.get("pattern"), schema.get("const"), *(enum if isinstance(enum, list) else []), *names):
        if isinstance(text, str) and len(text) > MAX_TEXT_CHARS:
            raise wrong(path, f"a string has {len(text)} characters, and {MAX_TEXT_CHARS} are allowed")


def _check_bounds(path: Path, schema: Mapping[str, object]) -> None:
    for least, most in (*AT_MOST, *LESS):
        low, high = schema.get(least), schema.get(most)
        if not (is_number(low) and is_number(high)):
            continue
        if low > high:
            raise wrong((*path, least), f"'{least}' {low} is more than '{most}' {high}: nothing could be written")
        if low == high and (least, most) in LESS:
            raise wrong((*path, least), f"'{least}' is '{most}', {low}: nothing could be written")
    required = schema.get("required", [])
    properties = _map(schema, "properties")
    optional = properties.keys() - set(required if isinstance(required, list) else [])
    if len(optional) > MAX_OPTIONAL:
        raise wrong(
            (*path, "properties"),
            f"{len(optional)} properties are not required, and at most {MAX_OPTIONAL} such properties are allowed",
        )


def _map(schema: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = schema.get(key, {})
    return value if isinstance(value, dict) else {}


def _target(path: Path, root: object, ref: str) -> Place:
    """What a reference points to, found as llguidance finds it: steps are taken as they are written."""
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
    if not is_schema(found):
        raise wrong((*path, "$ref"), f"'{ref}' is no schema")
    return Place(tuple(steps), found)


def _depth(value: object) -> int:
    """Schemas inside one another, references not followed."""
    depth, level = 0, [value]
    while level:
        level = [inner.schema for schema in level for inner in inner_schemas(schema) if inner.path[0] not in _DEFS]
        depth += 1
    return depth


_DEFS = ("$defs", "definitions")


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
