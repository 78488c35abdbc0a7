"""Converts arguments that a model generates as plain text to the types of the tool's schema.

A string is unchanged. Any other argument is JSON, or a Python literal (`True`, `None`, `{'a': 1}`), because templates
show earlier arguments in this form. A text that fits none of the schema's types becomes a string, so that the client
gets it.
"""

import ast
import json
from collections.abc import Mapping

from motet.text.tools.cursor import NotACall, decoded, is_encodable
from motet.text.tools.tool_format import Tool

ANY = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_REFERENCES = 16
"""Maximum length of a chain of references."""


def property_schema(tool: Tool, name: str) -> Mapping[str, object]:
    """Returns the schema of one argument, with its reference resolved; an empty schema if the argument has none."""
    properties = tool.parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = _referred(schema["$ref"], tool.parameters)
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Mapping[str, object], root: Mapping[str, object]) -> frozenset[str]:
    """Returns the JSON types that a schema allows. References are resolved in `root`, and can be circular."""
    types, waiting, visited = frozenset[str](), [schema], set[str]()
    while waiting:
        match waiting.pop():
            case {"$ref": str() as reference}:
                if reference not in visited:
                    visited.add(reference)
                    waiting.append(_referred(reference, root))
            case {"type": str() as kind}:
                types |= frozenset({kind}) & ANY or ANY
            case {"type": list() as kinds}:
                types |= frozenset(kind for kind in kinds if isinstance(kind, str)) & ANY or ANY
            case {"enum": list() as values}:
                types |= frozenset[str]().union(*map(_kinds, values)) or ANY
            case {"const": value}:
                types |= _kinds(value)
            case {"anyOf": list() as parts} | {"oneOf": list() as parts}:
                waiting += [part for part in parts if isinstance(part, Mapping)]
            case _:
                types |= ANY
    return types or ANY


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


def _referred(reference: object, root: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the schema of a reference such as `#/$defs/Unit`; an empty schema if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return {}
    place: object = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place if isinstance(place, Mapping) else {}
