"""Turns a client's JSON Schema into a schema that llguidance enforces exactly.

    text ─► normal_form ─► lowering ─► closed (optional) ─► exclusion ─► formats, numbers ─► limits ─► llguidance

The walk knows the path of each schema, so errors name the place in the client's schema. Constraints that llguidance
would silently ignore are replaced or refused, so that the output never violates the schema unnoticed.
"""

import json
from collections.abc import Mapping
from functools import lru_cache

from motet.errors import GrammarError
from motet.grammar.limits import MAX_LEVELS, MAX_SOURCE_CHARS, check_length
from motet.grammar.schema.closed import close_objects
from motet.grammar.schema.exclusion import exclude_others
from motet.grammar.schema.formats import enforce_format
from motet.grammar.schema.keywords import (
    DEFINITIONS,
    OPEN,
    TOO_DEEP,
    Schema,
    all_schemas,
    dict_at,
    inner_schemas,
    schema_error,
)
from motet.grammar.schema.lowering import lower
from motet.grammar.schema.multiples import Multiples
from motet.grammar.schema.normal_form import normal_form
from motet.grammar.schema.numbers import make_exact
from motet.grammar.schema.patterns import enforce_patterns


def read_schema(source: str, multiples: Multiples | None = None) -> Schema:
    """Returns a JSON Schema that is safe for llguidance. Raises `GrammarError` with the path of the invalid part.
    `multiples` has counted the other schemas of the same grammar."""
    parsed = _parse(source)
    before = parsed.pop(OPEN, None)
    lowered = lower(normal_form(parsed))
    open_root = lower(normal_form(before)) if isinstance(before, dict) else None
    try:
        return _enforceable(lowered, open_root, multiples=multiples or Multiples())
    except GrammarError:
        _check_values(normal_form(_parse(source)))  # its errors have the client's places
        raise


def _enforceable(schema: Schema, open_root: Schema | None, *, multiples: Multiples) -> Schema:
    """Returns a lowered schema with values that llguidance reads exactly. `open_root`: see `OPEN`."""
    exclude_others(schema, open_root=open_root)
    schemas = all_schemas(schema)
    for path, inner in schemas:
        if isinstance(inner, dict):
            enforce_format(inner)
            enforce_patterns(inner, path)
            make_exact(inner, path)
    schemas = all_schemas(schema)
    _check_levels(schema)
    multiples.add(schemas, schema)
    return schema


def _check_values(normal: Schema) -> None:
    """Raises `GrammarError` at a value that cannot be enforced."""
    schemas = all_schemas(normal)
    for path, inner in schemas:
        if isinstance(inner, dict):
            values = dict(inner)
            enforce_patterns(values, path)
            make_exact(values, path)
    Multiples().add(schemas, normal)


def closed_source(source: str) -> str:
    """Returns a schema in JSON with its objects closed. A schema that is invalid is returned unchanged."""
    return _closed_source(source) if len(source) <= MAX_SOURCE_CHARS else source


@lru_cache(maxsize=64)
def _closed_source(source: str) -> str:
    try:
        schema = lower(normal_form(_parse(source)))
    except GrammarError:
        return source
    before = json.loads(json.dumps(schema)) if '"oneOf"' in source else None
    close_objects(schema)
    if before is not None and before != schema:
        schema[OPEN] = before
    closed = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return closed if len(closed) <= MAX_SOURCE_CHARS else source


def closed_schema(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Returns a copy of a schema with its objects closed."""
    closed: Schema = json.loads(closed_source(json.dumps(schema, ensure_ascii=False)))
    return closed


def has_open_object(root: Mapping[str, object]) -> bool:
    """Returns True if an object can have properties with other names than the listed ones. An escape in such a name
    could spell a listed one."""
    return any(
        isinstance(schema, dict)
        and (schema.get("properties") or schema.get("patternProperties"))
        and (schema.get("additionalProperties") is not False or schema.get("patternProperties"))
        for _, schema in all_schemas(dict(root))
    )


def _parse(source: str) -> Schema:
    check_length(source, MAX_SOURCE_CHARS)
    try:
        schema = json.loads(source, parse_constant=_refuse)
        source.encode() if "\\" not in source else json.dumps(schema, ensure_ascii=False).encode()
    except RecursionError as exc:  # the depth at which it is raised depends on the interpreter
        raise schema_error((), TOO_DEEP) from exc
    except ValueError as exc:
        raise GrammarError(f"it is not valid JSON: {exc}") from exc
    if not isinstance(schema, dict):
        raise GrammarError("it must be an object")
    return schema


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not a number in JSON")


def _check_levels(root: Schema) -> None:
    refs = dict_at(root, "$defs").values()
    levels = len(refs) if len(refs) > MAX_LEVELS else sum(map(_depth, (root, *refs)))
    if levels > MAX_LEVELS:
        raise GrammarError(
            f"the depths of the schema and of the {len(refs)} schemas that it refers to add up to at least {levels} "
            f"levels; at most {MAX_LEVELS} are allowed"
        )


def _depth(value: object) -> int:
    """Returns the number of levels of nested schemas, without following references."""
    depth, level = 0, [value]
    while level:
        level = [
            inner.schema for schema in level for inner in inner_schemas(schema) if inner.path[0] not in DEFINITIONS
        ]
        depth += 1
    return depth
