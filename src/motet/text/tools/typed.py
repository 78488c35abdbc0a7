"""Arguments that a model writes as plain text, typed by the tool's schema as the model was told it.

A string stands as it is. Anything else is JSON, or Python's way of writing it (`True`, `None`, `{'a': 1}`), as
templates show earlier arguments so. What fits no type of the schema stays a string: the client sees what was written.
"""

import ast
import json
from collections.abc import Mapping

from motet.text.tools.base import Tool
from motet.text.tools.cursor import NotACall, can_be_sent, decoded

ANY = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
PYTHON_WORDS = {"True": True, "False": False, "None": None}
DEPTH = 16
"""References inside references that are followed."""


def property_schema(tool: Tool, name: str) -> Mapping[str, object]:
    """Of one argument, a reference followed; empty where the schema says nothing of it."""
    properties = tool.parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    for _ in range(DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = _referred(schema["$ref"], tool.parameters)
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Mapping[str, object], root: Mapping[str, object]) -> frozenset[str]:
    """JSON types that a value may have; `root` is what references are looked up in, each once: they may go in circles,
    and in more ways than could ever be followed."""
    types, left, seen = frozenset[str](), [schema], set[str]()
    while left:
        match left.pop():
            case {"$ref": str() as reference}:
                if reference not in seen:
                    seen.add(reference)
                    left.append(_referred(reference, root))
            case {"type": str() as kind}:
                types |= frozenset({kind}) & ANY or ANY
            case {"type": list() as kinds}:
                types |= frozenset(kind for kind in kinds if isinstance(kind, str)) & ANY or ANY
            case {"enum": list() as values}:
                types |= frozenset[str]().union(*map(_kinds, values)) or ANY
            case {"const": value}:
                types |= _kinds(value)
            case {"anyOf": list() as parts} | {"oneOf": list() as parts}:
                left += [part for part in parts if isinstance(part, Mapping)]
            case _:
                types |= ANY
    return types or ANY


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of what the model wrote as `text`."""
    bare = text.strip()
    if types != {"string"}:
        try:
            kinds = _kinds(decoded(bare))
        except NotACall:
            return _from_python(bare, types) or quoted_json(text)
        if kinds & types - {"string"} or (kinds == {"string"} and "string" not in types):
            return bare
    return quoted_json(text)


def quoted_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _from_python(text: str, types: frozenset[str]) -> str | None:
    if text in PYTHON_WORDS:
        value = PYTHON_WORDS[text]
    elif text[:1] in ("[", "{", "("):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    else:
        return None
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return written if _kinds(value) & types and can_be_sent(written) else None


def _kinds(value: object) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case Mapping():
            return frozenset({"object"})
        case list() | tuple():
            return frozenset({"array"})
    return frozenset()


def _referred(reference: object, root: Mapping[str, object]) -> Mapping[str, object]:
    """`#/$defs/Unit`; empty for what is not there."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return {}
    place: object = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place if isinstance(place, Mapping) else {}
