"""Proves that no value follows several schemas at once.

1. The schemas are split into alternatives (`anyOf`, `oneOf`), and each alternative into plain schemas, without
   references and combining keywords. A value must follow all plain schemas of one alternative.
2. An alternative is impossible if each type that all its plain schemas allow is impossible: numbers without a common
   range, a constant that another schema rejects, an object with an impossible required property, and so on.

A proof is certain. If there is none, the schemas can still exclude one another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, floor
from typing import Final

from motet.grammar.schema.keywords import NARROWED, TYPES, Schema, dict_at, is_number, list_at, target_of, types_of
from motet.grammar.schema.patterns import matches

MAX_STEPS: Final = 40_000
"""Maximum number of schemas, constants and patterns that are compared for one root schema. After that, nothing is
certain."""
MAX_DEPTH: Final = 8
"""Maximum number of properties and items inside one another, in which a contradiction is searched for."""
MAX_ALTERNATIVES: Final = 200
"""Maximum number of alternatives of one set of schemas."""
KEYWORD_TYPES: Final = {
    **dict.fromkeys(["items", "maxItems", "minItems", "prefixItems"], "array"),
    **dict.fromkeys(["maxProperties", "minProperties", "patternProperties", "properties", "required"], "object"),
    **dict.fromkeys(["additionalProperties"], "object"),
    **dict.fromkeys(["format", "maxLength", "minLength", "pattern"], "string"),
}
"""The type whose values each keyword constrains. All other keywords can constrain several types."""


@dataclass
class Disjointness:
    """Proofs for the schemas in one root schema, which is in the normal form."""

    root: Mapping[str, object]
    steps_left: int = MAX_STEPS

    def is_proven(self, schemas: Sequence[object], depth: int = 0) -> bool:
        """Returns True if it is certain that no value follows all of the schemas."""
        return depth <= MAX_DEPTH and not any(self._possible_types(schemas, depth))

    def common_types(self, schemas: Sequence[object]) -> frozenset[str]:
        """Returns the types of values that can follow all of the schemas."""
        return frozenset[str]().union(*self._possible_types(schemas, 0))

    def _possible_types(self, schemas: Sequence[object], depth: int) -> Iterator[frozenset[str]]:
        """Yields the types that values of each alternative can have; all types if that is too much work."""
        for number, plain in enumerate(self._alternatives(schemas)):
            if number >= MAX_ALTERNATIVES or self.exhausted:
                yield TYPES
                return
            yield self._possible(plain, depth)

    def labels(self, schema: object) -> dict[str, frozenset[str]]:
        """Maps each required property to the strings that a schema allows for it, if it allows nothing else."""
        alternatives = [*islice(self._alternatives([schema]), 2)]
        found: dict[str, frozenset[str]] = {}
        for plain in alternatives[0] if len(alternatives) == 1 else ():
            for name in map(str, list_at(plain, "required")):
                listed = [_constants(each) or [None] for each in self._property(plain, name) if isinstance(each, dict)]
                texts = [each for each in listed if all(isinstance(value, str) for value in each)]
                if texts:
                    found.setdefault(name, min((frozenset(map(str, each)) for each in texts), key=len))
        return found

    @property
    def exhausted(self) -> bool:
        """True if nothing more is certain, because it would be too much work."""
        return self.steps_left < 0

    def _alternatives(self, schemas: Sequence[object]) -> Iterator[list[Schema]]:
        """Yields the plain schemas of each alternative. Yields one without schemas, which allows every value, if there
        is too much work left."""
        unfinished = [_Alternative([*schemas], [], set())]
        while unfinished:
            alternative = unfinished.pop()
            options = self._expand(alternative)
            if self.exhausted:
                yield []
                return
            if options is None:
                yield alternative.plain
            else:
                self.steps_left -= len(options) * (1 + len(alternative.waiting) + len(alternative.expanded)) // 8
                unfinished += [alternative.with_option(each) for each in reversed(options)]

    def _expand(self, alternative: "_Alternative") -> Sequence[object] | None:
        """Moves schemas that wait to the plain schemas, up to a schema with options, which are returned. Returns None
        if no schema has any. No options are returned if the alternative has a schema that allows no value."""
        waiting, expanded = alternative.waiting, alternative.expanded
        while waiting:
            schema = waiting.pop()
            self.steps_left -= 1
            if schema is False or self.exhausted:
                return ()
            if not isinstance(schema, dict) or id(schema) in expanded:
                continue
            expanded.add(id(schema))
            waiting += list_at(schema, "allOf")
            if "$ref" in schema:
                waiting.append(target_of(str(schema["$ref"]), self.root))
            own = {key: value for key, value in schema.items() if key not in ("$ref", "$defs", "allOf")}
            options = [own.pop(key) for key in ("anyOf", "oneOf") if key in own]
            if own:
                alternative.plain.append(own)
            if options:
                waiting += [{"anyOf": more} for more in options[1:]]
                found: Sequence[object] = options[0]
                return found
        return None

    def _possible(self, plain: Sequence[Schema], depth: int) -> frozenset[str]:
        """Returns the types of values that can follow all of the plain schemas."""
        constants = [values for schema in plain if (values := _constants(schema)) is not None]
        self.steps_left -= sum(map(len, constants)) * len(min(constants, key=len, default=())) // 32
        if self.exhausted:
            return TYPES
        if constants:
            left = [
                v for v in min(constants, key=len) if not any(self._rejects(each, v, depth=depth) for each in plain)
            ]
            return frozenset(map(type_of, left))
        checks = {
            "array": lambda: self._no_array(plain, depth),
            "integer": lambda: _no_number(plain, integer=True),
            "number": lambda: _no_number(plain, integer=False),
            "object": lambda: self._no_object(plain, depth),
            "string": lambda: _no_string(plain),
        }
        types = frozenset.intersection(TYPES, *map(_types, plain))
        return frozenset(name for name in types if name not in checks or not checks[name]())

    def _no_array(self, plain: Sequence[Schema], depth: int) -> bool:
        least = max(_numbers(plain, "minItems"), default=0)
        if least > min(_numbers(plain, "maxItems"), default=least):
            return True
        prefix = max((len(list_at(schema, "prefixItems")) for schema in plain), default=0)
        at_each = ([_item(schema, at) for schema in plain] for at in range(int(min(least, prefix + 1))))
        return any(self.is_proven(items, depth + 1) for items in at_each)

    def _no_object(self, plain: Sequence[Schema], depth: int) -> bool:
        names = dict.fromkeys(name for schema in plain for name in list_at(schema, "required"))
        most = min(_numbers(plain, "maxProperties"), default=len(names))
        if max(_numbers(plain, "minProperties"), default=0) > most or len(names) > most:
            return True
        return any(
            self.is_proven([part for schema in plain for part in self._property(schema, str(name))], depth + 1)
            for name in ([] if self.exhausted else names)
        )

    def _rejects(self, schema: Schema, value: object, *, depth: int) -> bool:
        """Returns True if it is certain that a value does not follow a plain schema."""
        if (constants := _constants(schema)) is not None and not any(same(value, each) for each in constants):
            return True
        if type_of(value) not in _types(schema):
            return True
        if isinstance(value, str):
            return _no_string([schema, {"minLength": len(value), "maxLength": len(value), "const": value}])
        if is_number(value):
            return _no_number([schema, {"minimum": value, "maximum": value}], integer=isinstance(value, int))
        if isinstance(value, dict):
            missing = any(name not in value for name in list_at(schema, "required"))
            each = ([{"const": inner}, *self._property(schema, name)] for name, inner in value.items())
            return missing or any(self.is_proven(parts, depth + 1) for parts in each)
        if isinstance(value, list):
            low, high = _numbers([schema], "minItems"), _numbers([schema], "maxItems")
            if any(len(value) < number for number in low) or any(len(value) > number for number in high):
                return True
            return any(self.is_proven([{"const": each}, _item(schema, at)], depth + 1) for at, each in enumerate(value))
        return False

    def constrains(self, schema: object, name: str) -> bool:
        """Returns False if it is certain that a schema allows all values of a type."""
        waiting, visited = [schema], set[int]()
        while waiting:
            part = waiting.pop()
            self.steps_left -= 1
            if not isinstance(part, dict):
                if part is not True:
                    return True
                continue
            if id(part) in visited:
                continue
            visited.add(id(part))
            own = part.keys() - {"$defs", "$ref", "allOf", "type"}
            if self.exhausted or name not in types_of(part) or any(KEYWORD_TYPES.get(key, name) == name for key in own):
                return True
            waiting += list_at(part, "allOf")
            if "$ref" in part:
                waiting.append(target_of(str(part["$ref"]), self.root))
        return False

    def _property(self, schema: Mapping[str, object], name: str) -> list[object]:
        """Returns the schemas for a property, as far as they are certain."""
        found = [dict_at(schema, "properties")[name]] if name in dict_at(schema, "properties") else []
        by_pattern = dict_at(schema, "patternProperties")
        self.steps_left -= sum(1 + len(pattern) // 64 for pattern in by_pattern)
        if self.exhausted:
            return []
        matched = [(matches(pattern, name), each) for pattern, each in by_pattern.items()]
        found += [each for is_match, each in matched if is_match]
        if not found and all(is_match is False for is_match, _ in matched):
            found = [schema.get("additionalProperties", True)]
        return found


@dataclass
class _Alternative:
    """Schemas that a value must follow together."""

    waiting: list[object]
    """Schemas that are not split yet."""
    plain: list[Schema]
    expanded: set[int]
    """The ids of the schemas that were split."""

    def with_option(self, option: object) -> "_Alternative":
        return _Alternative([*self.waiting, option], [*self.plain], {*self.expanded})


def _types(schema: Mapping[str, object]) -> frozenset[str]:
    """Returns the types that the client's schema allows."""
    return types_of(schema) | ({"number"} if NARROWED in schema else frozenset())


def type_of(value: object) -> str:
    """Returns the type of a JSON value. A number without a fraction is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def same(one: object, other: object) -> bool:
    """Returns True for equal JSON values. Booleans are not numbers."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _constants(schema: Mapping[str, object]) -> Sequence[object] | None:
    """Returns the values of `const` or `enum`; None without them, or if the client's schema allows more."""
    if NARROWED in schema:
        return None
    return [schema["const"]] if "const" in schema else list_at(schema, "enum") if "enum" in schema else None


def _numbers(plain: Sequence[Mapping[str, object]], key: str) -> list[int | float]:
    return [number for schema in plain if is_number(number := schema.get(key))]


def _no_number(plain: Sequence[Schema], *, integer: bool) -> bool:
    low = [(number, False) for number in _numbers(plain, "minimum")]
    low += [(number, True) for number in _numbers(plain, "exclusiveMinimum")]
    high = [(number, False) for number in _numbers(plain, "maximum")]
    high += [(number, True) for number in _numbers(plain, "exclusiveMaximum")]
    if not low or not high:
        return False
    (least, open_below), (most, open_above) = max(low), min(high, key=lambda bound: (bound[0], not bound[1]))
    if integer:
        least = floor(least) + 1 if open_below else ceil(least)
        most = ceil(most) - 1 if open_above else floor(most)
        return least > most
    return least > most or (least == most and (open_below or open_above))


def _no_string(plain: Sequence[Schema]) -> bool:
    if max(_numbers(plain, "minLength"), default=0) > min(_numbers(plain, "maxLength"), default=float("inf")):
        return True
    patterns = [str(schema["pattern"]) for schema in plain if "pattern" in schema]
    texts = [text for schema in plain if isinstance(text := schema.get("const"), str)]
    return any(matches(pattern, text) is False for pattern in patterns for text in texts)


def _item(schema: Mapping[str, object], at: int) -> object:
    """Returns the schema for the item at a place of an array."""
    prefix = list_at(schema, "prefixItems")
    return prefix[at] if at < len(prefix) else schema.get("items", True)
