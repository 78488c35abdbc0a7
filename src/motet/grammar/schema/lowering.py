"""Replaces keywords that llguidance does not enforce by keywords that it does, where the result allows the same values.

    if, then, else       `anyOf`: the values of `if` that follow `then`, and other values that follow `else`
    not                  the complement (`negation`)
    dependentRequired    `anyOf`: the property is missing, or it and the others are present
    dependentSchemas     `anyOf`: the property is missing, or it is present and the value follows the schema
    propertyNames        `patternProperties`, or named properties (`property_names`)
    uniqueItems          nothing for arrays of at most one item; a list of the arrays of a few constants, or, if there
                         are too many, of the arrays whose items are in the order of the constants
    contains             nothing or `minItems`, where all items count
    unevaluated...       `additionalProperties` or `items`, if the names and items that other schemas know are certain

A schema for which no replacement is known is refused, and the error names the keyword. `oneOf` is replaced later
(`exclusion`). The schema is in the normal form.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations, permutations
from math import comb, perm
from typing import Final

from motet.errors import GrammarError
from motet.grammar.limits import MAX_SOURCE_CHARS
from motet.grammar.schema.disjoint import same
from motet.grammar.schema.keywords import (
    NARROWED,
    Path,
    Schema,
    dict_at,
    inner_schemas,
    is_any,
    list_at,
    resolved,
    schema_error,
    target_of,
    types_of,
)
from motet.grammar.schema.negation import KINDS, Complements, all_of, any_of
from motet.grammar.schema.property_names import restrict_names

MAX_ARRAYS: Final = 200
"""Maximum number of arrays that are listed for `uniqueItems`."""
MAX_DEPENDENT: Final = 8
"""Maximum number of properties of one schema on which others depend. The number of alternatives doubles with each."""
MAX_LOWERED_CHARS: Final = 4 * MAX_SOURCE_CHARS
"""Approximate maximum number of characters of a schema after the replacements."""
PARTS: Final = ("then", "else", "minContains", "maxContains")
"""Keywords that mean something only next to another one."""
COMPLEMENTED: Final = (
    "types, constants, bounds, lengths, counts, 'required', 'properties' and combinations of these, within limits"
)
"""The constraints with which `not` and `if` are enforced, for errors."""
CONDITIONS: Final[Mapping[str, str]] = {
    "unevaluatedProperties": "next to 'properties', 'allOf' and '$ref', and not next to other combinations",
    "unevaluatedItems": "if no keyword other than 'prefixItems' has schemas for the array",
    "dependentRequired": f"for up to {MAX_DEPENDENT} properties",
    "dependentSchemas": f"for up to {MAX_DEPENDENT} properties",
    "if": f"for conditions on {COMPLEMENTED}",
    "not": f"for {COMPLEMENTED}",
    "propertyNames": "with one of 'pattern', 'format', lengths, 'const' and 'enum', and without 'patternProperties'",
    "uniqueItems": "for arrays of at most one item, and for items with a few constants",
    "contains": "if it has the schema of 'items', or allows everything",
}
"""Condition under which each keyword is enforced, for the error where it is not."""
APPLICATORS: Final = frozenset(["$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"])
"""Keywords with other schemas for the same value."""


def lower(root: Schema) -> Schema:
    """Returns the schema without these keywords. Changes `root`. Raises `GrammarError` at a keyword that has no
    replacement."""
    lowering = _Lowering(root)
    for name, schema in dict_at(root, "$defs").items():
        lowering.lower(schema, ("$defs", name))
    lowering.lower(root, ())
    if not lowering.changed:
        return root
    _check_size(root)
    separate: Schema = json.loads(json.dumps(root))  # a complement shares parts with its schema
    return separate


def _check_size(root: Schema) -> None:
    """Raises `GrammarError` if the JSON of a schema is too long. Parts that are shared count each time."""
    left = MAX_LOWERED_CHARS
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        left -= len(value) + 4 if isinstance(value, str) else 8
        if left < 0:
            message = f"its keywords that are replaced by others make it longer than {MAX_LOWERED_CHARS} characters"
            raise GrammarError(message)
        if isinstance(value, dict):
            left -= sum(map(len, value))
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def not_enforced(keyword: str) -> str:
    """Returns the message for a keyword that has no replacement in its schema."""
    return (
        f"the keyword '{keyword}' is supported only {CONDITIONS[keyword]}; "
        "leave it out, and check the answer for it instead"
    )


class _Lowering:
    """Replaces the keywords in one root schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self.changed = False
        self._complements = Complements(root)
        self._negated = set[int]()
        """The ids of the schemas that replace `not`. The properties that they name stay unevaluated."""
        self._replacements: Mapping[str, Callable[[Schema], object]] = {
            # The first two depend on the schemas that the others replace.
            "unevaluatedProperties": self._unevaluated_properties,
            "unevaluatedItems": self._unevaluated_items,
            "dependentRequired": self._dependent_required,
            "dependentSchemas": self._dependent_schemas,
            "if": self._if,
            "not": lambda schema: self._complements.of(schema["not"]),
            "propertyNames": lambda schema: restrict_names(schema, self._root),
            "uniqueItems": self._unique_items,
            "contains": _contains,
        }

    def lower(self, schema: object, path: Path) -> None:
        """Replaces the keywords in a schema and, before that, in the schemas inside it."""
        if not isinstance(schema, dict):
            return
        for inner in inner_schemas(schema):
            if inner.path[0] != "$defs":
                self.lower(inner.schema, (*path, *inner.path))
        extra: list[object] = []
        for key in [key for key in self._replacements if key in schema]:
            replacement = self._replacements[key](schema)
            if replacement is None:
                raise schema_error((*path, key), not_enforced(key))
            del schema[key]
            self.changed = True
            if key == "not":
                self._negated.add(id(replacement))
            if not is_any(replacement):
                extra.append(replacement)
        for part in PARTS:
            schema.pop(part, None)
        if extra:
            schema["allOf"] = [*list_at(schema, "allOf"), *extra]

    def _if(self, schema: Schema) -> object:
        condition, then, other = schema["if"], schema.get("then", True), schema.get("else", True)
        if is_any(then) and is_any(other):
            return True
        complement = self._complements.of(condition)
        return None if complement is None else any_of([all_of([condition, then]), all_of([complement, other])])

    def _dependent_required(self, schema: Schema) -> object:
        needs = dict_at(schema, "dependentRequired").items()
        return _dependent(schema, {name: {"required": each} for name, each in needs if each})

    def _dependent_schemas(self, schema: Schema) -> object:
        return _dependent(schema, dict_at(schema, "dependentSchemas"))

    def _unique_items(self, schema: Schema) -> object:
        tuple_length = len(list_at(schema, "prefixItems")) if schema.get("items") is False else None
        if not schema["uniqueItems"] or "array" not in types_of(schema):
            return True
        most = min((n for n in (schema.get("maxItems"), tuple_length) if isinstance(n, int)), default=None)
        if most is not None and most <= 1:
            return True
        values = None if "prefixItems" in schema else self._constants(schema.get("items"))
        if values is None:
            return None
        least = schema.get("minItems", 0)
        lengths = range(least if isinstance(least, int) else 0, min(len(values), most or len(values)) + 1)
        if sum(comb(len(values), n) for n in lengths) > MAX_ARRAYS:
            return None
        arrange = permutations if sum(perm(len(values), n) for n in lengths) <= MAX_ARRAYS else combinations
        arrays = [list(each) for each in chain.from_iterable(arrange(values, n) for n in lengths)]
        narrowed = {NARROWED: True} if arrange is combinations else {}
        return any_of([{"enum": arrays, **narrowed} if arrays else False, _other_types(schema, "array")])

    def _constants(self, schema: object) -> Sequence[object] | None:
        """Returns the values that a schema allows; None if it is not a list of constants."""
        schema = resolved(schema, self._root)
        if not isinstance(schema, dict):
            return None
        if schema == {"type": "boolean"}:
            return [False, True]
        listed = [schema["const"]] if "const" in schema else list_at(schema, "enum")
        if not listed or len(listed) > MAX_ARRAYS or not schema.keys() <= {"const", "enum", "type"}:
            return None
        return [value for at, value in enumerate(listed) if not any(same(value, each) for each in listed[:at])]

    def _unevaluated_properties(self, schema: Schema) -> object:
        if "additionalProperties" in schema or is_any(schema["unevaluatedProperties"]):
            return True
        names = self._known_names(schema, set())
        if names is None:
            return None
        schema["properties"] = dict_at(schema, "properties") | {
            name: True for name in names if name not in dict_at(schema, "properties")
        }
        schema["additionalProperties"] = schema["unevaluatedProperties"]
        return True

    def _known_names(self, schema: object, visited: set[int], *, depth: int = 0) -> list[str] | None:
        """Returns the names of the properties that a schema and its parts know; None if they depend on the value. Parts
        whose ids are in `visited` are left out."""
        if not isinstance(schema, dict) or id(schema) in visited or id(schema) in self._negated:
            return []
        visited.add(id(schema))
        if depth > MAX_DEPENDENT or APPLICATORS & schema.keys() - {"$ref", "allOf"}:
            return None
        if depth and not schema.keys().isdisjoint(("additionalProperties", "patternProperties")):
            return None
        names = [*dict_at(schema, "properties")]
        parts = list_at(schema, "allOf") + ([target_of(str(schema["$ref"]), self._root)] if "$ref" in schema else [])
        for part in parts:
            found = self._known_names(part, visited, depth=depth + 1)
            if found is None:
                return None
            names += found
        return names

    def _unevaluated_items(self, schema: Schema) -> object:
        if "items" in schema or is_any(schema["unevaluatedItems"]):
            return True
        if not schema.keys().isdisjoint((*APPLICATORS, "contains")):
            return None
        schema["items"] = schema["unevaluatedItems"]
        return True


def _dependent(schema: Schema, needs: Mapping[str, object]) -> object:
    """Returns a schema for objects with what each of their properties needs."""
    required = list_at(schema, "required")
    parts = [each for name, each in needs.items() if name in required]
    others = {name: each for name, each in needs.items() if name not in required and not is_any(each)}
    if len(others) > MAX_DEPENDENT:
        return None
    for name, each in others.items():
        missing: Schema = {"type": "object", "properties": {name: False}}
        present = all_of([{"type": "object", "required": [name]}, each])
        parts.append(any_of([missing, present, _other_types(schema, "object")]))
    return all_of(parts)


def _other_types(schema: Schema, name: str) -> object:
    """Returns a schema for the values of a schema that have another type."""
    others = [kind for kind in KINDS if kind in types_of(schema) and kind != name]
    integers = ["integer"] if "integer" in types_of(schema) and "number" not in others else []
    return {"type": [*others, *integers]} if others or integers else False


def _contains(schema: Schema) -> object:
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if least == 0 and most is None:
        return True
    if not is_any(schema["contains"]) and not same(schema["contains"], schema.get("items")):
        return None
    if "prefixItems" in schema and not is_any(schema["contains"]):
        return None
    return {"minItems": least} | ({} if most is None else {"maxItems": most})
