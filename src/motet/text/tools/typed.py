"""Converts arguments that a model generates as plain text to the types of the tool's schema.

A string is unchanged. Any other argument is JSON, or a Python literal (`True`, `None`, `{'a': 1}`), because templates
show earlier arguments in this form. A text that fits none of the schema's types becomes a string, so that the client
gets it.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from functools import reduce

from motet.text.tools.cursor import NotACall, decoded, is_encodable

ANY = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_REFERENCES = 100
"""Maximum length of a chain of references, and of schemas in schemas."""
Schema = Mapping[str, object]


def types_of(schema: object, root: Schema) -> frozenset[str]:
    """Returns the JSON types that a schema allows. References are resolved in `root`, and can be circular."""
    return TypesOf(root)(schema) or ANY


class TypesOf:
    """Computes the types that the schemas of one root allow, once for each schema and each reference. A schema that
    allows no value has no types."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[str, frozenset[str] | None] = {}
        """Types of the schemas of references. None while they are being computed."""
        self._results: dict[int, tuple[object, frozenset[str]]] = {}
        """Schemas by their ids, with their types."""

    def __call__(self, schema: object) -> frozenset[str]:
        if (result := self._results.get(id(schema))) is None:
            types = self.of(schema)
            result = self._results[id(schema)] = schema, ANY if types is None else types
        return result[1]

    def of(self, schema: object, *, depth: int = 0) -> frozenset[str] | None:
        """Returns None if the types are not known, because the schema refers to itself or is too deep."""
        if depth > MAX_REFERENCES:
            return None
        if not isinstance(schema, Mapping):
            return ANY
        constraints: list[frozenset[str] | None] = [*_own_types(schema), *self._types_of_parts(schema, depth)]
        if isinstance(reference := schema.get("$ref"), str):
            constraints.append(self._of_reference(reference, depth))
        known = [each for each in constraints if each is not None]
        if constraints and not known:
            return None
        return reduce(_common, known, ANY)

    def _types_of_parts(self, schema: Schema, depth: int) -> Iterator[frozenset[str] | None]:
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if not isinstance(parts, list):
                continue
            types = [self.of(part, depth=depth + 1) for part in parts if part is not False]
            if key == "allOf":
                yield from types
            elif types:
                known = [each for each in types if each is not None]
                yield frozenset[str]().union(*known) if known else None

    def _of_reference(self, reference: str, depth: int) -> frozenset[str] | None:
        if reference not in self._known:
            self._known[reference] = None
            self._known[reference] = self.of(referred(reference, self._root), depth=depth + 1)
        return self._known[reference]


def _own_types(schema: Schema) -> Iterator[frozenset[str]]:
    """Yields the types that each keyword of a schema allows, without the schemas in it."""
    match schema.get("type"):
        case str() as kind:
            yield frozenset({kind}) & ANY or ANY
        case list() as kinds:
            yield frozenset(kind for kind in kinds if isinstance(kind, str)) & ANY or ANY
    if isinstance(values := schema.get("enum"), list):
        yield frozenset[str]().union(*map(_kinds, values)) or ANY
    if "const" in schema:
        yield _kinds(schema["const"])


def _common(types: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    """Returns the types in both sets. A number can be an integer."""
    numbers = {"integer", "number"}
    both = types & others
    return both | {"integer"} if types & numbers and others & numbers and not both & numbers else both


def as_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of an argument that the model generated as `text`."""
    bare = text.strip()
    if types != {"string"}:
        try:
            kinds = _kinds(decoded(bare))
        except NotACall:
            return _from_python(bare, types) or quoted(text)
        if kinds & types - {"string"} or (kinds == {"string"} and "string" not in types):
            return bare
    return quoted(text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _from_python(text: str, types: frozenset[str]) -> str | None:
    if text not in ("True", "False", "None") and not text.startswith(("[", "{", "(")):
        return None
    try:
        value = ast.literal_eval(text)
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if text.startswith("(") and not isinstance(value, tuple):
        return None  # a string in parentheses, which Python reads like the value without them
    return encoded if _kinds(value) & types and is_encodable(encoded) else None


_KINDS: Mapping[type, frozenset[str]] = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    str: frozenset({"string"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    tuple: frozenset({"array"}),
}


def _kinds(value: object) -> frozenset[str]:
    """Returns the JSON types of a value; an empty set for a value that JSON does not have."""
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    return _KINDS.get(type(value), frozenset())


def referred(reference: object, root: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the schema of a reference such as `#/$defs/Unit`; an empty schema if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return {}
    place: object = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place if isinstance(place, Mapping) else {}
