"""Closes the objects of a client's schema: they can have the properties that the schema names, and no others.

According to the standard, an object can have any additional properties, and small models generate them until they reach
`max_tokens`. Most clients send schemas without `additionalProperties` and mean closed objects.

    {properties: a}                              gets additionalProperties: false
    only anyOf, oneOf or $ref                    each part is closed separately
    allOf, or parts in addition to properties    No value could satisfy two closed parts. The parts therefore stay open,
                                                 and the schema that combines them gets all their names and is closed.
                                                 If a `$ref` elsewhere uses such a part alone, the part is open there
                                                 too: llguidance accepts no keywords next to a circular reference, so
                                                 the schema with the `$ref` cannot be closed instead.

1. `run` collects the schemas of values (`_value_schemas`), and from them the schemas that can be closed
   (`_closable_schemas`).
2. It collects the parts that these schemas combine.
3. It closes each schema of step 1 that is not a part of another one.

A schema that states itself which other properties are allowed (`DECIDING`) is unchanged: if one part does, all parts
that apply to the same object stay as they are. The schema is in the normal form.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from motet.grammar.limits import MAX_OPTIONAL
from motet.grammar.schema.keywords import Schema, SchemaPath, dict_at, inner_schemas, list_at, target_of

MAX_WORK: Final = 10_000
"""Maximum number of parts and property names that are processed for one root schema. Objects beyond that stay open."""
COMBINING: Final = ("allOf", "anyOf", "oneOf")
"""Keywords with a list of schemas that apply to the same value as the schema itself, like the schema of a `$ref`."""
OBJECT_KEYWORDS: Final = frozenset(
    ["additionalProperties", "const", "enum", "minProperties", "patternProperties", "properties", "required"]
)
DECIDING: Final = ("additionalProperties", "const", "enum")
"""Keywords with which a schema itself decides which other properties are allowed."""


def close_objects(root: Schema) -> None:
    """Closes the objects of a schema in place."""
    _ObjectCloser(root).run()


class _ObjectCloser:
    """Closes the objects of one root schema in place."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._work_left = MAX_WORK

    def run(self) -> None:
        closable = list(self._closable_schemas(self._value_schemas()))
        parts_of_others = {id(part) for schema in closable for part in self._parts(schema)[1:]}
        for schema in closable:
            if id(schema) not in parts_of_others:
                self._close(schema)

    def _value_schemas(self) -> Iterator[Schema]:
        """Yields the schemas of values: all inner schemas except schemas that are only a part of another schema."""
        waiting, visited = [SchemaPath((), self._root)], set[int]()
        while waiting:
            path, schema = waiting.pop()
            if not isinstance(schema, dict):
                continue
            if not path or path[0] not in (*COMBINING, "$defs", "$ref"):
                yield schema
            if id(schema) in visited:
                continue
            visited.add(id(schema))
            waiting += inner_schemas(schema)
            waiting += [SchemaPath(("$ref",), found) for found in self._referred(schema)]

    def _closable_schemas(self, value_schemas: Iterable[Schema]) -> Iterator[Schema]:
        """Yields the schemas to close, each once: schemas with properties, and schemas that combine several parts."""
        waiting, visited = list(value_schemas), set[int]()
        while waiting:
            schema = waiting.pop()
            if id(schema) in visited:
                continue
            visited.add(id(schema))
            members = self._members(schema)
            num_keywords = sum(key in schema for key in (*COMBINING, "$ref"))
            combines = num_keywords > 1 or ("allOf" in schema and len(members) > 1)
            if combines or not schema.keys().isdisjoint(OBJECT_KEYWORDS):
                yield schema
            else:
                waiting += members

    def _parts(self, schema: Schema) -> list[Schema]:
        """Returns a schema and all other schemas that apply to the same value, in the order of the document."""
        parts: dict[int, Schema] = {}
        waiting = [schema]
        while waiting and self._work_left > 0:
            part = waiting.pop()
            if id(part) not in parts:
                self._work_left -= 1
                parts[id(part)] = part
                waiting += reversed(self._members(part))
        return [*parts.values()]

    def _close(self, schema: Schema) -> None:
        """Closes a schema, unless it is invalid, has a keyword of `DECIDING`, or would then allow no value or exceed a
        limit."""
        parts = self._parts(schema)
        properties = [part["properties"] for part in parts if "properties" in part]
        patterns = [part["patternProperties"] for part in parts if "patternProperties" in part]
        required = [name for part in parts for name in list_at(part, "required") if isinstance(name, str)]
        named = [*properties, dict.fromkeys(required)]
        if any(key in part for part in parts for key in DECIDING) or not all(isinstance(each, dict) for each in named):
            return
        if not (properties or patterns) or patterns not in ([], [schema.get("patternProperties")]):
            return
        names = dict.fromkeys(name for each in named if isinstance(each, dict) for name in each)
        self._work_left -= len(names) if len(parts) > 1 else 0
        minimums = [minimum for part in parts if isinstance(minimum := part.get("minProperties"), int)]
        too_few = not patterns and max(minimums, default=0) > len(names)
        if self._work_left <= 0 or too_few or (len(parts) > 1 and len(names) > MAX_OPTIONAL):
            return
        own = dict_at(schema, "properties")
        if not (patterns and names.keys() - own.keys()):  # other names could match a pattern
            schema.update(properties=dict.fromkeys(names, True) | own, additionalProperties=False)

    def _members(self, schema: Schema) -> list[Schema]:
        """Returns the schemas that `schema` applies to the same value directly, not through another schema."""
        members = [each for key in COMBINING for each in list_at(schema, key) if isinstance(each, dict)]
        return members + self._referred(schema)

    def _referred(self, schema: Schema) -> list[Schema]:
        """Returns the schema of a `$ref`; empty without one."""
        found = target_of(str(schema["$ref"]), self._root) if "$ref" in schema else None
        return [found] if isinstance(found, dict) else []
