"""Closes the objects of a client's schema: they have the properties that the schema names, and no others.

By the standard an object may have any other property too, and small models write them until their tokens run out. Most
clients send schemas without `additionalProperties` and mean closed objects.

    {properties: a}                               gets additionalProperties: false
    anyOf, oneOf, $ref, and nothing beside them   each part is closed by itself
    allOf, or parts beside properties             two closed parts could never both hold, so the parts stay open, and
                                                  what holds them gets all their names and is closed. A part
                                                  stays open where it is used alone, too: llguidance takes no
                                                  keywords beside a circular reference that could close it there

What the schema says itself is kept: `additionalProperties` in one part leaves all that apply to the same object as they
are. A schema is read before it is checked here, so whatever is wrong in it stays as it is, for the check to find.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from motet.errors import GrammarError
from motet.grammar.json_schema import SchemaPath, inner_schemas, target
from motet.grammar.limits import MAX_OPTIONAL, MAX_SOURCE_CHARS

MAX_WORK: Final = 10_000
"""Most parts and names that are added up in one schema. Objects behind that stay open."""

IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas apply to the same object as the schema that has them; so does that of a reference."""
OF_OBJECTS: Final = (
    "additionalProperties",
    "const",
    "enum",
    "minProperties",
    "patternProperties",
    "properties",
    "required",
)
SAID: Final = ("additionalProperties", "const", "enum", "unevaluatedProperties")
"""Keywords that say themselves which other properties there may be."""

Schema = dict[str, object]


def closed_source(source: str) -> str:
    """Returns the text of a schema with its objects closed; a text that is no schema as it is."""
    if len(source) > MAX_SOURCE_CHARS:
        return source
    try:
        schema = msgspec.json.decode(source, type=Schema)
    except (msgspec.MsgspecError, RecursionError):
        return source
    _Closing(schema).run()
    closed = msgspec.json.encode(schema).decode()
    return closed if len(closed) <= MAX_SOURCE_CHARS else source


def closed_schema(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Returns a copy of a schema with its objects closed."""
    closed: Schema = json.loads(closed_source(json.dumps(schema, ensure_ascii=False)))
    return closed


class _Closing:
    """Closes one schema in place."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MAX_WORK

    def run(self) -> None:
        whole = list(self._whole())
        heads = list(self._heads(whole))
        shared = {id(part) for head in heads for part in self._parts(head)[1:]}
        for head in heads:
            if id(head) not in shared:
                self._close(head)

    def _whole(self) -> Iterator[Schema]:
        """Yields the schemas that a value must follow, but not those which are only a part of one."""
        waiting, seen = [SchemaPath((), self._root)], set[int]()
        while waiting:
            path, schema = waiting.pop()
            if not isinstance(schema, dict):
                continue
            if not path or path[0] not in (*IN_PLACE, "$defs", "definitions", "$ref"):
                yield schema
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            waiting += inner_schemas(schema)
            waiting += [SchemaPath(("$ref",), found) for found in self._referred(schema)]

    def _heads(self, whole: Iterable[Schema]) -> Iterator[Schema]:
        """Yields the schemas that are closed by themselves, each once."""
        waiting, seen = list(whole), set[int]()
        while waiting:
            schema = waiting.pop()
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            members = self._members(schema)
            several = sum(key in schema for key in (*IN_PLACE, "$ref")) > 1 or ("allOf" in schema and len(members) > 1)
            if several or not schema.keys().isdisjoint(OF_OBJECTS):
                yield schema
            else:
                waiting += members

    def _parts(self, head: Schema) -> list[Schema]:
        """Returns a schema and all others that apply to the same value, in the order in which they are written."""
        parts: dict[int, Schema] = {}
        waiting = [head]
        while waiting and self._left > 0:
            part = waiting.pop()
            if id(part) not in parts:
                self._left -= 1
                parts[id(part)] = part
                waiting += reversed(self._members(part))
        return [*parts.values()]

    def _close(self, head: Schema) -> None:
        parts = self._parts(head)
        properties = [part["properties"] for part in parts if "properties" in part]
        patterns = [part["patternProperties"] for part in parts if "patternProperties" in part]
        named = [*properties, *(dict.fromkeys(_texts(part.get("required"))) for part in parts)]
        if any(key in part for part in parts for key in SAID) or not all(isinstance(each, dict) for each in named):
            return
        if not (properties or patterns) or patterns not in ([], [head.get("patternProperties")]):
            return
        names = dict.fromkeys(name for each in named if isinstance(each, dict) for name in each)
        self._left -= len(names) if len(parts) > 1 else 0
        least = [most for part in parts if isinstance(most := part.get("minProperties"), int)]
        too_few = not patterns and max(least, default=0) > len(names)
        if self._left <= 0 or too_few or (len(parts) > 1 and len(names) > MAX_OPTIONAL):
            return
        given = head.get("properties")
        own: Schema = given if isinstance(given, dict) else {}
        if patterns and names.keys() - own.keys():  # these may follow a pattern
            return
        head["properties"] = dict.fromkeys(names, True) | own
        head["additionalProperties"] = False

    def _members(self, schema: Schema) -> list[Schema]:
        """Returns the schemas that apply to the same value because this one names them."""
        lists = [schema.get(key) for key in IN_PLACE]
        members = [each for named in lists if isinstance(named, list) for each in named if isinstance(each, dict)]
        return members + self._referred(schema)

    def _referred(self, schema: Schema) -> list[Schema]:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return []
        try:
            found = target((), self._root, ref=ref).schema
        except GrammarError:
            return []
        return [found] if isinstance(found, dict) else []


def _texts(names: object) -> list[str]:
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
