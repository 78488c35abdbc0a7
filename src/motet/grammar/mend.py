"""Rewrites a checked schema where llguidance would not follow the standard.

- An excluded bound on the side of 0 becomes the next number of 15 digits. llguidance allows the bound itself if the
  other bound is less than 1 away (`exclusiveMinimum` 10 with `maximum` 10.5). It does follow the bound on the other
  side, which stays as it is: with a bound of 15 digits there, no shorter number could end.
- Formats for which it allows too much become patterns: days that a year does not have, the year 0, seconds after 59,
  endless fractions, names in Punycode.
- `oneOf` becomes `anyOf` if its parts exclude one another, which may only be visible through their references;
  llguidance does not follow these.
"""

import decimal
from collections.abc import Mapping, Sequence
from typing import Final

from motet.grammar.json_schema import TYPES, is_number

LEAST: Final = 1e-20
"""The number that counts as next to 0."""
DIGITS: Final = decimal.Context(prec=15)
"""llguidance reads only numbers with up to this many digits exactly."""
MAX_BOUND: Final = 1e14
"""Larger numbers of 15 digits have no fraction; such a bound stays as it is."""

MAX_HOST_CHARS: Final = 253
MAX_PARTS: Final = 100
MAX_NAMES: Final = 32
"""Most properties of a part that are compared with other parts."""

_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9][0-9]|00[1-9][0-9]|000[1-9])"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# 63 characters, no hyphen at either end, and not two hyphens at the third and fourth place, as in `xn--`.
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
"""Patterns that replace formats. Those for times are what Python reads as ISO 8601, with an offset as in RFC 3339."""


def mend(schema: dict[str, object], targets: Mapping[str, object]) -> None:
    """Changes one schema, but not those inside it. `targets`: the schema of each reference."""
    _mend_bounds(schema)
    _mend_format(schema)
    _mend_one_of(schema, targets)


def _mend_bounds(schema: dict[str, object]) -> None:
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
        beside = float(next_to(decimal.Decimal(repr(bound)))) if bound else sign * LEAST
        other = schema.get(inclusive, beside)
        schema[inclusive] = tighter(beside, other) if is_number(other) else beside
        del schema[exclusive]


def _mend_format(schema: dict[str, object]) -> None:
    pattern = PATTERNS.get(str(schema.get("format")))
    if pattern is None:
        return
    if schema.pop("format") == "hostname":
        most = schema.get("maxLength")
        schema["maxLength"] = min(most, MAX_HOST_CHARS) if isinstance(most, int) else MAX_HOST_CHARS
    if "pattern" not in schema:
        schema["pattern"] = pattern
        return
    others = schema.get("allOf")
    both: dict[str, object] = {"pattern": pattern, **({"type": schema["type"]} if "type" in schema else {})}
    schema["allOf"] = [*(others if isinstance(others, list) else []), both]


def _mend_one_of(schema: dict[str, object], targets: Mapping[str, object]) -> None:
    parts = schema.get("oneOf")
    if not isinstance(parts, list) or "anyOf" in schema or len(parts) > MAX_PARTS:
        return
    seen = [_views(part, targets) for part in parts]
    if max(map(len, seen)) > 1 and _apart(seen):
        schema["anyOf"] = schema.pop("oneOf")


def _views(part: object, targets: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Returns a schema and the schemas that it refers to, each once; an answer must follow all of them."""
    views: list[Mapping[str, object]] = []
    while isinstance(part, dict) and not any(part is view for view in views) and len(views) < MAX_NAMES:
        views.append(part)
        part = targets.get(str(part.get("$ref")))
    return views


def _apart(parts: list[list[Mapping[str, object]]]) -> bool:
    """Returns True if no answer can follow two of the parts: they have different types, or they are objects with a
    common property that has a different constant text in each."""
    types = [frozenset.intersection(TYPES, *map(_types, views)) for views in parts]
    objects = [views for views, names in zip(parts, types, strict=True) if "object" in names]
    others = [names - {"object"} for names in types]
    return not _overlap(others) and (len(objects) <= 1 or _told_apart([_labels(views) for views in objects]))


def _types(view: Mapping[str, object]) -> frozenset[str]:
    """Returns the types that a schema allows; a number may be an integer."""
    named = view.get("type", list(TYPES))
    names = frozenset(named if isinstance(named, list) else [named])
    return names | {"integer"} if "number" in names else names


def _told_apart(parts: list[dict[str, frozenset[str]]]) -> bool:
    names = frozenset.intersection(*(frozenset(labels) for labels in parts))
    return any(not _overlap([labels[name] for labels in parts]) for name in names)


def _labels(views: list[Mapping[str, object]]) -> dict[str, frozenset[str]]:
    """Maps each required property to its allowed texts, for the first `MAX_NAMES`."""
    found: dict[str, frozenset[str]] = {}
    for view in views:
        required, properties = view.get("required"), view.get("properties")
        if not isinstance(required, list) or not isinstance(properties, dict):
            continue
        for name in required[:MAX_NAMES]:
            texts = _texts(properties.get(name))
            if texts:
                found.setdefault(name, texts)
    return found


def _texts(schema: object) -> frozenset[str]:
    """Returns all values that a schema allows if these are a few texts, else nothing."""
    if not isinstance(schema, dict):
        return frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) > MAX_NAMES:
        return frozenset()
    texts = frozenset(value for value in values if isinstance(value, str))
    return texts if len(texts) == len(values) else frozenset()


def _overlap(sets: Sequence[frozenset[str]]) -> bool:
    return len(frozenset[str]().union(*sets)) < sum(map(len, sets))
