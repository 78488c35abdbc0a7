"""Bounds and constants that llguidance reads exactly. It keeps numbers in 64 bits: as floats, and then as integers.

- A bound without an exact float becomes the next float inside the range, and a bound outside of 64-bit integers becomes
  the largest one. So some numbers beyond 2 ** 53 are valid, and never generated.
- A positive `exclusiveMinimum`, a negative `exclusiveMaximum`, and 0 become inclusive bounds: the next number with 15
  digits. Otherwise llguidance accepts the bound itself if the other bound is less than 1 away (`exclusiveMinimum` 10
  with `maximum` 10.5). Other exclusive bounds are unchanged: llguidance follows them, and with an inclusive bound of 15
  digits instead, no shorter number could end.
- A constant that would become another number is refused.
"""

import decimal
import math
from typing import Final

from motet.grammar.schema.keywords import Path, Schema, is_number, list_at, schema_error

NEXT_TO_ZERO: Final = 1e-20
"""Number that counts as the next number after 0."""
DIGITS: Final = decimal.Context(prec=15)
"""Precision up to which llguidance reads numbers with a fraction exactly."""
MAX_BOUND: Final = 1e14
"""Exclusive bounds from this number on are not rewritten, because a number of 15 digits has no fraction there."""
LARGEST: Final = 2**63 - 1024
"""The largest integer that is exact as a float and has 64 bits."""
LOW: Final = ("minimum", "exclusiveMinimum")
HIGH: Final = ("maximum", "exclusiveMaximum")


def make_exact(schema: Schema, path: Path) -> None:
    """Changes the bounds of one schema, but not of the schemas inside it. Raises `GrammarError` at a number that
    llguidance would change."""
    for key, values in (("const", [schema.get("const")]), ("enum", list_at(schema, "enum"))):
        for value in values:
            if (inexact := _inexact(value)) is not None:
                message = f"{inexact} cannot be generated exactly; use a string, or a number with at most 15 digits"
                raise schema_error((*path, key), message)
    for key in (*LOW, *HIGH):
        bound = schema.get(key)
        if is_number(bound):
            schema[key] = _inside(bound, 1 if key in LOW else -1, where=(*path, key))
    if schema.get("type") != "integer":
        _include_bounds(schema)


def _inside(bound: float, sign: int, *, where: Path) -> float:
    """Returns an exact number that is at least a lower bound (`sign` 1), or at most an upper bound (`sign` -1)."""
    if sign * bound > LARGEST:
        limit = f"at most {LARGEST}" if sign > 0 else f"at least {-LARGEST}"
        raise schema_error(where, f"{bound} is too far from 0; '{where[-1]}' must be {limit}")
    if sign * bound < -LARGEST:
        return -sign * LARGEST
    exact = float(bound)
    if isinstance(bound, int):
        if sign * exact < sign * bound:
            exact = math.nextafter(exact, sign * math.inf)
        return int(exact)
    return exact


def _inexact(value: object) -> object:
    """Returns a number in a constant that llguidance would change; None without one."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return next((found for each in inner if (found := _inexact(each)) is not None), None)
    if not is_number(value):
        return None
    if value == int(value) if math.isfinite(value) else False:
        exact = abs(value) <= LARGEST and int(float(value)) == value
    else:
        exact = len(decimal.Decimal(repr(value)).as_tuple().digits) <= DIGITS.prec
    return None if exact else value


def _include_bounds(schema: Schema) -> None:
    for exclusive, inclusive, sign, next_to, tighter in (
        ("exclusiveMinimum", "minimum", 1, DIGITS.next_plus, max),
        ("exclusiveMaximum", "maximum", -1, DIGITS.next_minus, min),
    ):
        bound = schema.get(exclusive)
        if not is_number(bound) or not 0 <= sign * bound < MAX_BOUND:
            continue
        neighbour = float(next_to(decimal.Decimal(repr(bound)))) if bound else sign * NEXT_TO_ZERO
        other = schema.get(inclusive, neighbour)
        schema[inclusive] = tighter(neighbour, other) if is_number(other) else neighbour
        del schema[exclusive]
