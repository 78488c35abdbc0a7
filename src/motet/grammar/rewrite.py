"""Rewrites a checked schema where llguidance would not follow the JSON Schema standard.

- A positive `exclusiveMinimum`, a negative `exclusiveMaximum`, and 0 become inclusive bounds: the next number with 15
  digits. Otherwise llguidance accepts the bound itself if the other bound is less than 1 away (`exclusiveMinimum` 10
  with `maximum` 10.5). Other exclusive bounds are unchanged: llguidance follows them, and with an inclusive bound of 15
  digits instead, no shorter number could end.
- Formats for which llguidance accepts invalid values become patterns. It accepts days that a month does not have, the
  year 0, seconds greater than 59, fractions without limit, and names in Punycode.
- `oneOf` becomes `anyOf` if its parts exclude one another. Sometimes only the schemas that they refer to show this, and
  llguidance does not follow references here.
"""

import decimal
from collections.abc import Mapping, Sequence
from typing import Final

from motet.grammar.json_schema import TYPES, dict_at, is_number, list_at

NEXT_TO_ZERO: Final = 1e-20
"""Number that counts as the next number after 0."""
DIGITS: Final = decimal.Context(prec=15)
"""Precision up to which llguidance parses numbers exactly."""
MAX_BOUND: Final = 1e14
"""Bounds from this number on are not rewritten, because a number of 15 digits has no fraction there."""
MAX_HOST_CHARS: Final = 253
MAX_PARTS: Final = 100
"""Maximum number of parts of a `oneOf` that is rewritten."""
MAX_NAMES: Final = 32
"""Maximum number of properties of a part that are compared with other parts."""

_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9][0-9]|00[1-9][0-9]|000[1-9])"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# At most 63 characters, no hyphen at either end, and no two hyphens at the third and fourth place, as in `xn--`.
_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)

PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
"""Patterns that replace formats. Times are as Python parses them (ISO 8601), with an offset as in RFC 3339."""


def rewrite(schema: dict[str, object], targets: Mapping[str, object]) -> None:
    """Rewrites one schema in place, but not the schemas inside it. `targets`: schema of each reference."""
    _rewrite_bounds(schema)
    _rewrite_format(schema)
    _rewrite_one_of(schema, targets)


def _rewrite_bounds(schema: dict[str, object]) -> None:
    if schema.get("type") == "integer":
        return
    for exclusive, inclusive, sign, next_to, tighter in (
        ("exclusiveMinimum", "minimum", 1, DIGITS.next_plus, max),
        ("exclusiveMaximum", "maximum", -1, DIGITS.next_minus, min),
    ):
        bound = schema.get(exclusive)
        if bound is True:  # in draft 4
            bound = schema.get(inclusive)
        if not is_number(bound) or not 0 <= sign * bound < MAX_BOUND:
            continue
        neighbour = float(next_to(decimal.Decimal(repr(bound)))) if bound else sign * NEXT_TO_ZERO
        other = schema.get(inclusive, neighbour)
        schema[inclusive] = tighter(neighbour, other) if is_number(other) else neighbour
        del schema[exclusive]


def _rewrite_format(schema: dict[str, object]) -> None:
    if (pattern := PATTERNS.get(str(schema.get("format")))) is None:
        return
    if schema.pop("format") == "hostname":
        maximum = schema.get("maxLength")
        schema["maxLength"] = min(maximum, MAX_HOST_CHARS) if isinstance(maximum, int) else MAX_HOST_CHARS
    if "pattern" not in schema:
        schema["pattern"] = pattern
        return
    own_type = {"type": schema["type"]} if "type" in schema else {}
    schema["allOf"] = [*list_at(schema, "allOf"), {"pattern": pattern, **own_type}]


def _rewrite_one_of(schema: dict[str, object], targets: Mapping[str, object]) -> None:
    parts = schema.get("oneOf")
    if not isinstance(parts, list) or "anyOf" in schema or len(parts) > MAX_PARTS:
        return
    chains = [_reference_chain(part, targets) for part in parts]
    if max(map(len, chains)) > 1 and _exclude_each_other(chains):
        schema["anyOf"] = schema.pop("oneOf")


def _reference_chain(part: object, targets: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Returns a schema, the schema that it refers to, and so on, each once. A value must satisfy all of them."""
    chain: list[Mapping[str, object]] = []
    while isinstance(part, dict) and not any(part is schema for schema in chain) and len(chain) < MAX_NAMES:
        chain.append(part)
        part = targets.get(str(part.get("$ref")))
    return chain


def _exclude_each_other(chains: list[list[Mapping[str, object]]]) -> bool:
    """Returns True if no value can satisfy two of the parts: they have different types, or they are objects with a
    common required property that has a different constant string in each part."""
    types = [frozenset.intersection(TYPES, *map(_types, chain)) for chain in chains]
    objects = [chain for chain, names in zip(chains, types, strict=True) if "object" in names]
    others = [names - {"object"} for names in types]
    return not _overlap(others) and (len(objects) <= 1 or _have_a_discriminator([_labels(chain) for chain in objects]))


def _types(schema: Mapping[str, object]) -> frozenset[str]:
    """Returns the types that a schema allows. A schema that allows numbers allows integers."""
    named = schema.get("type", list(TYPES))
    names = frozenset(named if isinstance(named, list) else [named])
    return names | {"integer"} if "number" in names else names


def _have_a_discriminator(parts: list[dict[str, frozenset[str]]]) -> bool:
    """Returns True if a property has different strings in all parts."""
    names = frozenset.intersection(*(frozenset(labels) for labels in parts))
    return any(not _overlap([labels[name] for labels in parts]) for name in names)


def _labels(chain: list[Mapping[str, object]]) -> dict[str, frozenset[str]]:
    """Maps each required property to its allowed strings, for the first `MAX_NAMES` properties."""
    found: dict[str, frozenset[str]] = {}
    for schema in chain:
        properties = dict_at(schema, "properties")
        for name in map(str, list_at(schema, "required")[:MAX_NAMES]):
            if texts := _texts(properties.get(name)):
                found.setdefault(name, texts)
    return found


def _texts(schema: object) -> frozenset[str]:
    """Returns all values that a schema allows if they are strings, at most `MAX_NAMES`; otherwise an empty set."""
    if not isinstance(schema, dict):
        return frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) > MAX_NAMES:
        return frozenset()
    texts = frozenset(value for value in values if isinstance(value, str))
    return texts if len(texts) == len(values) else frozenset()


def _overlap(sets: Sequence[frozenset[str]]) -> bool:
    return len(frozenset[str]().union(*sets)) < sum(map(len, sets))
