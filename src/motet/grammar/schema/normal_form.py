"""Brings a client's schema of any draft into one form, which the rest of the package and llguidance understand.

    drafts        Keywords of earlier drafts become keywords of 2020-12: arrays in `items`, `additionalItems`,
                  `dependencies`, booleans in `exclusiveMinimum` and `exclusiveMaximum`. Up to draft 7, `$ref` hides the
                  keywords next to it.
    references    Each schema that is referred to is under `$defs` once, with a plain name, and all references to it are
                  `#/$defs/NAME`, or `#` for the whole schema. The library `referencing` resolves them: pointers with
                  escapes, `$id`, `$anchor`, embedded resources, and the metaschemas of the drafts.
    annotations   Titles, descriptions, unknown keywords, and definitions that nothing refers to are left out.

Each schema is checked on the way, so errors name the place in the client's schema. The name of a definition is the path
of its schema, after `$` if it is not a definition of the client, so errors that are found later name this place too.
The normal form of a normal form is the same.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, NamedTuple

import jsonschema_specifications
from referencing import Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT4, DRAFT202012, lookup_recursive_ref

from motet.errors import GrammarError
from motet.grammar.limits import MAX_SCHEMAS
from motet.grammar.schema.drafts import draft_of, modern_keywords
from motet.grammar.schema.keywords import (
    ELSEWHERE,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SCHEMAS,
    Path,
    Schema,
    check_keywords,
    check_nesting,
    dict_at,
    list_at,
    schema_error,
    shortened,
)

MAX_SHOWN: Final = 100
"""Maximum number of characters of a reference in an error."""
NAMING: Final = ("$id", "id", "$anchor", "$dynamicAnchor")
"""Keywords that name a schema."""
REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.$-]")
"""Characters that the name of a definition does not have, because a reference would escape them."""


def normal_form(root: Mapping[str, object]) -> Schema:
    """Returns a schema in the normal form. Raises `GrammarError` for a value of a wrong type, bounds that contradict
    each other, a reference that does not lead to a schema, and a schema over a limit."""
    check_nesting(root)
    return _Normaliser(root).run()


class _Scope(NamedTuple):
    """The base of the references in a schema, and its draft."""

    resolver: Any
    """A resolver of `referencing`, which does not export its class."""
    draft: Specification[Any]

    def inside(self, schema: Mapping[str, object], path: Path) -> "_Scope":
        """Returns the scope in a schema, which can have an `$id` and a `$schema` of its own."""
        draft = draft_of(schema, default=self.draft)
        key = "id" if draft is DRAFT4 else "$id"
        if not isinstance(schema.get(key), str):
            return self._replace(draft=draft)
        try:
            return _Scope(self.resolver.in_subresource(draft.create_resource(schema)), draft)
        except ValueError as error:
            raise schema_error((*path, key), f"{shortened(schema[key])} is not a URI") from error


class _Target(NamedTuple):
    """A schema that is referred to."""

    name: str
    schema: object
    path: Path
    scope: _Scope


class _Normaliser:
    """Makes the normal form of one schema."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._refs: dict[int, str] = {id(root): "#"}
        """References of the normal form by the ids of the schemas that they lead to."""
        self._waiting: list[_Target] = []
        self._names: set[str] = set()
        self._schemas_left = MAX_SCHEMAS

    def run(self) -> Schema:
        draft = draft_of(self._root, default=DRAFT202012)
        resource = draft.create_resource(self._root)
        registry = jsonschema_specifications.REGISTRY.with_resource("", resource)
        if self._has_names:
            # Otherwise each reference to a name would search the schema again. The library expects valid schemas.
            with suppress(Exception):
                registry = registry.crawl()
        out = self._schema(self._root, (), scope=_Scope(registry.resolver(), draft))
        defs: Schema = {}
        while self._waiting:
            target = self._waiting.pop()
            defs[target.name] = self._schema(target.schema, target.path, scope=target.scope)
        assert isinstance(out, dict)
        return {"$defs": defs, **out} if defs else out

    def _schema(self, schema: object, path: Path, *, scope: _Scope) -> Schema | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise schema_error(path, "expected a schema (an object or a boolean)")
        self._schemas_left -= 1
        if self._schemas_left < 0:
            raise GrammarError(f"the schema has more than {MAX_SCHEMAS} schemas inside it")
        check_keywords(path, schema)
        scope = scope.inside(schema, path)
        out: Schema = {}
        for key, old_key, value in modern_keywords(schema, draft=scope.draft):
            where = (*path, old_key)
            if key in REFERENCES:
                if "$ref" in out:
                    raise schema_error(where, "a schema can have only one reference")
                out["$ref"] = self._reference(key, str(value), where=where, scope=scope)
            elif key in SCHEMA_MAPS and isinstance(value, dict):
                inner = {name: self._schema(each, (*where, name), scope=scope) for name, each in value.items()}
                before = dict_at(out, key)  # `dependencies` and `dependentSchemas` can have the same names
                both = {name: {"allOf": [before[name], inner[name]]} for name in before.keys() & inner.keys()}
                out[key] = before | inner | both
            elif key == "dependentRequired" and isinstance(value, dict):
                before = dict_at(out, key)
                out[key] = before | {name: [*list_at(before, name), *each] for name, each in value.items()}
            elif key in SCHEMA_LISTS and isinstance(value, list):
                out[key] = [self._schema(each, (*where, number), scope=scope) for number, each in enumerate(value)]
            else:
                out[key] = self._schema(value, where, scope=scope) if key in SCHEMAS else value
        return out

    def _reference(self, keyword: str, ref: str, *, where: Path, scope: _Scope) -> str:
        """Returns the reference of the normal form to the schema that a client's reference leads to."""
        if keyword != "$ref" and self._is_dynamic:
            raise schema_error(where, f"'{keyword}' is not supported where several schemas have the same anchor")
        shown = f"'{ref}'" if len(ref) <= MAX_SHOWN else f"'{ref[:MAX_SHOWN]}...'"
        try:
            recursive = keyword == "$recursiveRef"
            found = lookup_recursive_ref(scope.resolver) if recursive else scope.resolver.lookup(ref)
        except Unresolvable as error:
            why = "does not exist" if ref.startswith("#") else "is not in this schema; others are not loaded"
            raise schema_error(where, f"{shown} {why}") from error
        except Exception as error:  # the library expects valid schemas
            raise schema_error(where, f"{shown} does not exist") from error
        schema = found.contents
        if not isinstance(schema, dict | bool):
            raise schema_error(where, f"{shown} is not a schema")
        if isinstance(schema, bool) or id(schema) not in self._refs:
            path = where if isinstance(schema, bool) else self._paths.get(id(schema), where)
            name = self._new_name(path)
            self._waiting.append(_Target(name, schema, path, _Scope(found.resolver, scope.draft)))
            if isinstance(schema, bool):
                return f"#/$defs/{name}"
            self._refs[id(schema)] = f"#/$defs/{name}"
        return self._refs[id(schema)]

    def _new_name(self, path: Path) -> str:
        steps = path[1:] if path[0] == "$defs" and len(path) == 2 else (ELSEWHERE, *path)
        name = text = NOT_IN_NAMES.sub("_", ".".join(map(str, steps))) or "_"
        number = 1
        while name in self._names:
            number += 1
            name = f"{text}-{number}"
        self._names.add(name)
        return name

    @cached_property
    def _paths(self) -> dict[int, Path]:
        """The path of each object in the client's schema, by its id."""
        paths: dict[int, Path] = {}
        waiting: list[tuple[Path, object]] = [((), self._root)]
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, dict):
                paths[id(value)] = path
                waiting += [((*path, key), inner) for key, inner in value.items()]
            elif isinstance(value, list):
                waiting += [((*path, number), inner) for number, inner in enumerate(value)]
        return paths

    @property
    def _has_names(self) -> bool:
        """True if a schema in the client's schema can have a name, which is not its path."""
        waiting: list[object] = [self._root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                if any(isinstance(value.get(key), str) for key in NAMING):
                    return True
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
        return False

    @cached_property
    def _is_dynamic(self) -> bool:
        """True if dynamic references in the client's schema can lead to different schemas."""
        anchors: list[object] = []
        waiting: list[object] = [self._root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                anchors += [value[key] for key in ("$dynamicAnchor", "$recursiveAnchor") if key in value]
            waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return len(anchors) > len(set(map(str, anchors)))
