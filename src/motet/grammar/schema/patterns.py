"""Patterns of schemas: matched by RE2 where its answer is certain, and rewritten for llguidance."""

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
        schema["pattern"] = _without_null(pattern, (*path, "pattern"))
    if by_pattern := dict_at(schema, "patternProperties"):
        where = (*path, "patternProperties")
        schema["patternProperties"] = {_without_null(key, where): each for key, each in by_pattern.items()}


def _without_null(pattern: str, where: Path) -> str:
    """Returns a pattern whose negated classes do not match U+0000. llguidance allows an escaped quotation mark and an
    escaped backslash wherever a class has all characters below U+0020, even if the class excludes them (`[^"]`)."""
    out: list[str] = []
    in_class = False
    for piece in PIECES.findall(pattern):
        if piece in NULLS or CONTROLS.match(piece):
            if out[-1:] == ["["] and piece in NULLS:  # a range from U+0000 starts at U+0001
                out.append(r"\x01")
                continue
            raise schema_error(where, f"{piece!r} is not supported in a pattern")
        out.append(piece)
        if not in_class and piece == "[":
            in_class = True
        elif in_class and piece == "^" and out[-2] == "[":
            out.append(r"\x00")
        elif in_class and piece == "]" and out[-2] != "[":
            in_class = False
    return "".join(out)
