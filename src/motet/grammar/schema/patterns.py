"""Patterns of schemas: matched by RE2 where its answer is certain, and rewritten for llguidance.

llguidance has no look-ahead. The patterns with look-ahead that Pydantic and zod generate are replaced: Pydantic's for
decimals by a pattern that matches a part of the same texts (always a digit before the point, no additional zeros), and
zod's by patterns that match the same texts.
"""

import re
from functools import lru_cache
from typing import Any, Final

import re2

from motet.grammar.limits import MAX_TEXT_CHARS
from motet.grammar.schema.keywords import Path, Schema, dict_at, schema_error

PIECES: Final = re.compile(r"\\x00|\\u0000|\\u\{0+\}|\\0|\\[pP]\{[^}]*\}|\\[pP].|\\.|\[:\w+:\]|\x00|.", re.DOTALL)
"""Characters of a pattern with their escapes."""
NULLS: Final = ("\0", r"\x00", r"\u0000", r"\0")
CONTROLS: Final = re.compile(r"\\p\{?(C|Cc|Other|Control|cntrl)\}?$|\[:cntrl:\]", re.IGNORECASE)
"""Classes with all control characters and without other ones that JSON escapes."""
EXTENDED: Final = re.compile(r"\(\?[a-zA-Z]*x")
"""Start of a group with the flag for white space and comments in a pattern."""

DECIMAL_START: Final = r"^(?!^[-+.]*$)[+-]?0*"
"""Start of Pydantic's patterns for `Decimal`."""
DECIMAL_ENDS: Final = tuple(
    re.compile(end)
    for end in (
        r"\\d\*\\\.\?\\d(?:\*|\{0,(?P<places>\d{1,3})\}0\*)\$",
        r"\(\?:\\d\{0,(?P<whole>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,(?P<chars>\d{1,3})\}0\*\$\)"
        r"\\d(?:\*|\{0,\d+\})\\\.\\d(?:\*|\{0,(?P<places>\d{1,3})\})0\*\$\)",
    )
)
"""Ends of these patterns: without and with a maximum number of digits."""
MAX_DIGITS: Final = 100
"""Maximum number of digits in a pattern for `Decimal` that is replaced."""
ZOD: Final = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)?"
        r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)))$"
    ),
}
"""Zod's patterns for `email` (in versions up to 4.3) and `iso.duration`, and the patterns that replace them."""

MAX_MEMORY: Final = 1 << 20
"""Maximum memory of one compiled pattern in bytes."""


def matches(pattern: str, text: str) -> bool | None:
    """Returns True if a pattern matches a part of a text. Returns None if this is not certain: RE2 does not have the
    pattern's syntax, or the pattern has a class such as `\\s`, for which engines disagree about characters outside of
    ASCII."""
    if len(text) > MAX_TEXT_CHARS or ("\\" in pattern and not text.isascii()):
        return None
    compiled = _compiled(pattern)
    return None if compiled is None else compiled.search(text) is not None


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_MEMORY
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None


def enforce_patterns(schema: Schema, path: Path) -> None:
    """Rewrites the patterns of one schema, but not of the schemas inside it. Raises `GrammarError` at a pattern that
    cannot be enforced exactly."""
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _without_null(without_look_ahead(pattern), (*path, "pattern"))
    if by_pattern := dict_at(schema, "patternProperties"):
        where = (*path, "patternProperties")
        schema["patternProperties"] = {
            _without_null(without_look_ahead(key), where): each for key, each in by_pattern.items()
        }


def without_look_ahead(pattern: str) -> str:
    """Returns the replacement for a pattern of Pydantic or zod with look-ahead; any other pattern unchanged."""
    if not pattern.startswith(DECIMAL_START):
        return ZOD.get(pattern, pattern)
    found = next(filter(None, (end.fullmatch(pattern, len(DECIMAL_START)) for end in DECIMAL_ENDS)), None)
    if found is None:
        return pattern
    counts = {name: int(count) for name, count in found.groupdict().items() if count is not None}
    if any(count > MAX_DIGITS for count in counts.values()):
        return pattern
    return f"^[+-]?(?:{'|'.join(_decimals(**counts))})$"


def _decimals(*, whole: int | None = None, chars: int | None = None, places: int | None = None) -> list[str]:
    """Returns patterns for decimals without a sign. `whole` is the maximum number of digits before the point, `chars`
    of all digits and the point, and `places` of digits after the point."""
    digits = r"\d+" if whole is None else rf"\d{{1,{whole}}}" if whole else "0"
    if whole is not None and chars is not None and places is None:  # each digit before the point leaves one less after
        return [digits, *(rf"\d{{1,{before}}}\.\d{{1,{chars - 1 - before}}}" for before in range(1, chars - 1))]
    most = places if places is None or chars is None else min(places, chars - 1)
    fraction = r"(?:\.\d+)?" if most is None else rf"(?:\.\d{{1,{most}}})?" if most else ""
    return [digits + fraction]


def _without_null(pattern: str, where: Path) -> str:
    """Returns a pattern whose classes have the same meaning for llguidance, and whose negated classes do not match
    U+0000. llguidance allows an escaped quotation mark and an escaped backslash wherever a class has all characters
    below U+0020, even if the class excludes them (`[^"]`). Raises `GrammarError` where engines disagree."""
    if EXTENDED.search(pattern):
        raise schema_error(where, "the flag 'x' is not supported in a pattern")
    out: list[str] = []
    in_class = starts = False
    for piece in PIECES.findall(pattern):
        if piece in NULLS or CONTROLS.match(piece):
            if out[-1:] == ["["] and piece in NULLS:  # a range from U+0000 starts at U+0001
                out.append(r"\x01")
                starts = False
                continue
            raise schema_error(where, f"{piece!r} is not supported in a pattern")
        if in_class:
            _check_in_class(piece, first=starts, after=out[-1], where=where)
        out.append(f"\\{piece}" if in_class and piece in ("[", "&", "~") else piece)
        if not in_class:
            in_class = starts = piece == "["
        elif starts and piece == "^" and out[-2] == "[":
            out.append(r"\x00")
        else:
            starts = False
            in_class = piece != "]"
    return "".join(out)


def _check_in_class(piece: str, *, first: bool, after: str, where: Path) -> None:
    """Raises `GrammarError` at a piece of a class with different meanings in JavaScript, Python and Rust. `first`: only
    `[` or `[^` precede it."""
    if piece == "]" and first:
        raise schema_error(where, r"a class of a pattern starts with ']', which must be written '\]'")
    if piece == "-" and after == "-":
        raise schema_error(where, r"a class of a pattern has '--'; a hyphen must be written '\-'")
    if piece.startswith("[:"):
        raise schema_error(where, f"{piece!r} is not supported in a pattern; use a class such as [a-z]")
