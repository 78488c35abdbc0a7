"""The complement of a schema, as far as schemas without `not` can express it."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from motet.grammar.schema.keywords import NARROWED, Schema, dict_at, is_any, is_number, list_at, target_of, types_of
from motet.grammar.schema.numbers import LARGEST

MAX_DEPTH: Final = 12
"""Maximum number of schemas inside one another, through references too, that are complemented."""
MAX_COMPLEMENTS: Final = 5_000
"""Maximum number of schemas that are complemented for one root schema, and of schemas in the complements."""
MAX_WORDS_CHARS: Final = 400
"""Maximum number of characters of the strings that a pattern excludes."""
LIMITS: Final[Mapping[str, tuple[str, str, int]]] = {
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""The type, the opposite keyword, and the difference of its value, for each keyword that limits a count."""
BOUNDS: Final = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
"""The opposite keyword of each keyword that limits a number."""
KINDS: Final = ("array", "boolean", "null", "number", "object", "string")
"""The types without `integer`, whose values are numbers too."""
Options = Sequence[object] | None
"""Schemas that together allow what a keyword does not allow. None if there are no such schemas."""


class Complements:
    """Makes the complements of schemas in one root schema, which is in the normal form."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._left = MAX_COMPLEMENTS

    def of(self, schema: object, *, names: Collection[str] | None = None, depth: int = 0) -> Schema | bool | None:
        """Returns a schema for the values that `schema` does not allow. Returns None if only `not` can express it, or
        if it is too much work. Numbers that are not integers can be missing from the complement of integers; it then
        has the key `NARROWED`, and no complement of its own.

        `names`: all names that properties of the values can have; None if they can have any."""
        if isinstance(schema, bool):
            return not schema
        self._left -= 1
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self._left < 0:
            return None
        options: list[object] = []
        for key, value in schema.items():
            if key == "additionalProperties" and value is False and names is not None:
                found = _with_one_of(names, schema)
            else:
                found = self._options(key, value, schema=schema, depth=depth + 1)
            if found is None:
                return None
            self._left -= len(found)
            options += found
        return any_of(options) if self._left >= 0 else None

    def _options(self, key: str, value: object, *, schema: Mapping[str, object], depth: int) -> Options:
        """Returns the options for one keyword."""
        if key == "$defs" or (key in ("additionalProperties", "items") and is_any(value)):
            return []
        if key == "type":
            return _other_types(types_of(schema))
        if key in ("const", "enum"):
            values = [value] if key == "const" else list_at(schema, "enum")
            return _other_values(values) if len(values) <= self._left else None
        if key in LIMITS and isinstance(value, int):
            kind, opposite, difference = LIMITS[key]
            return [{"type": kind, opposite: value + difference}] if value + difference >= 0 else []
        if key in BOUNDS:
            too_far = is_number(value) and abs(value) > LARGEST
            return None if too_far else [{"type": "number", BOUNDS[key]: value}]
        if key == "required":
            required = [*dict.fromkeys(map(str, list_at(schema, "required")))]
            return _without_one(required) if self._allows_prefixes(len(required)) else None
        if key in ("allOf", "anyOf", "prefixItems", "properties", "$ref"):
            return self._options_of_schemas(key, value, depth=depth)
        return None

    def _options_of_schemas(self, key: str, value: object, *, depth: int) -> Options:
        """Returns the options for a keyword with schemas."""
        names = list(value) if isinstance(value, dict) else []
        inner = [target_of(str(value), self._root)] if key == "$ref" else value
        each = [*inner.values()] if isinstance(inner, dict) else inner if isinstance(inner, list) else []
        if key == "prefixItems" and not self._allows_prefixes(len(each)):
            return None
        complements = [self.of(schema, depth=depth) for schema in each]
        if any(complement is None for complement in complements):
            return None
        if key == "anyOf":
            return [] if any(each is False for each in complements) else [{"allOf": complements}]
        options: list[object] = []
        for at, complement in enumerate(complements):
            if key == "properties":
                complement = complement and {
                    "type": "object",
                    "required": [names[at]],
                    "properties": {names[at]: complement},
                }
            elif key == "prefixItems":
                complement = complement and {
                    "type": "array",
                    "minItems": at + 1,
                    "prefixItems": [True] * at + [complement],
                }
            options.append(complement)
        return options

    def _allows_prefixes(self, count: int) -> bool:
        """Counts the work for all prefixes of a list, and returns True if it is not too much."""
        self._left -= count * count // 16
        return self._left >= 0


def any_of(options: Iterable[object]) -> Schema | bool:
    """Returns a schema that allows what at least one of the schemas allows."""
    left = [each for each in options if each is not False]
    if any(map(is_any, left)):
        return True
    if len(left) == 1 and isinstance(left[0], dict):
        return left[0]
    return {"anyOf": left} if left else False


def all_of(parts: Iterable[object]) -> Schema | bool:
    """Returns a schema that allows what all of the schemas allow."""
    left = [each for each in parts if not is_any(each)]
    if any(each is False for each in left):
        return False
    if len(left) == 1 and isinstance(left[0], dict):
        return left[0]
    return {"allOf": left} if left else True


def pattern_without(words: Sequence[str]) -> str:
    """Returns a pattern that matches every string except the words."""
    return f"^{_not_in(sorted(set(words)))}$"


def _without_one(names: Sequence[str]) -> Options:
    """Returns schemas for the objects that lack one of the properties, by the first one that they lack."""
    return [{"type": "object", "required": names[:at], "properties": {name: False}} for at, name in enumerate(names)]


def _with_one_of(names: Collection[str], schema: Mapping[str, object]) -> Options:
    """Returns schemas for the objects with a property that a closed schema does not have."""
    if "patternProperties" in schema:
        return None
    return [{"type": "object", "required": [name]} for name in names if name not in dict_at(schema, "properties")]


def _other_types(names: frozenset[str]) -> Options:
    if "integer" in names and "number" not in names:  # no schema allows exactly the numbers that are not integers
        return [{"type": [kind for kind in KINDS if kind not in names and kind != "number"], NARROWED: True}]
    others = [kind for kind in KINDS if kind not in names]
    return [{"type": others}] if others else []


def _other_values(values: Sequence[object]) -> Options:
    """Returns schemas for all other values. Returns None if one of these values is an array or an object."""
    if any(isinstance(value, dict | list) for value in values):
        return None
    booleans = [value for value in values if isinstance(value, bool)]
    numbers = sorted({value for value in values if is_number(value)})
    words = [value for value in values if isinstance(value, str)]
    if sum(map(len, words)) > MAX_WORDS_CHARS or any(abs(number) > LARGEST for number in numbers):
        return None
    given = {"null": None in values, "boolean": booleans, "number": numbers, "string": words}
    options: list[object] = [{"type": [kind for kind in KINDS if not given.get(kind)]}]
    if booleans:
        options += [{"const": value} for value in (False, True) if value not in booleans]
    if numbers:
        options.append({"type": "number", "exclusiveMaximum": numbers[0]})
        between = [{"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)]
        options += [{"type": "number", **bounds} for bounds in between]
        options.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if words:
        options.append({"type": "string", "pattern": pattern_without(words)})
    return options


def _not_in(words: Sequence[str]) -> str:
    """Returns an expression for every string that is not one of the words, which are sorted and differ."""
    ends: dict[str, list[str]] = {}
    for word in words:
        if word:
            ends.setdefault(word[0], []).append(word[1:])
    if not ends:
        return r"[\s\S]+" if words else r"[\s\S]*"
    others = f"[^{''.join(map(_in_class, ends))}][\\s\\S]*"
    options = [others, *(re.escape(first) + _not_in(after) for first, after in ends.items())]
    return f"(?:{'|'.join(options)})" + ("" if "" in words else "?")


def _in_class(character: str) -> str:
    return f"\\{character}" if character in r"\[]^-&~" else character
