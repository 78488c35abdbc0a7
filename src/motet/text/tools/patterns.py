"""Converts the patterns and formats of JSON Schemas to regular expressions of llguidance for complete strings.

A pattern is an ECMAScript expression that matches a part of a string. llguidance has the syntax of Rust, in which some
escapes have another meaning, and which has neither look-around nor references to groups.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

TAG_START: Final = "<"


class Unsupported(Exception):
    """A pattern that llguidance cannot match. The argument is the reason."""


class StringRegex(NamedTuple):
    """A regular expression for complete strings."""

    source: str
    """Source for Lark, without the slashes around it."""
    may_have_tags: bool = False
    """False if certainly none of the strings contains `TAG_START`."""


_PIECES = re.compile(
    r"\\u\{(?P<braces>[0-9a-fA-F]+)\}|\\u(?P<unicode>[0-9a-fA-F]{4})|\\x(?P<hex>[0-9a-fA-F]{2})|\\0(?!\d)"
    r"|\\[pP]\{[^}]*\}|\\.|\(\?<(?![=!])[^>]*>|\(\?:|\(\?<?[=!]|\(\?|\{\d+(?:,\d*)?\}|.",
    re.DOTALL,
)
_SPACE = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_SAFE_RANGE = re.compile("[0-8]-[1-9]|[a-y]-[b-z]|[A-Y]-[B-Z]")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_ANYTHING = "(?s:.)"


def regex_of_pattern(pattern: str) -> StringRegex:
    """Returns the regular expression of a pattern. Raises `Unsupported`."""
    converter = _Converter()
    for found in _PIECES.finditer(pattern):
        converter.add(found)
    return converter.result()


def literal(text: str) -> str:
    """Returns a regular expression for one text."""
    return "".join(map(_char, text)) or "(?:)"


def without(tag: str) -> str:
    """Returns a regular expression for all texts that do not contain `tag`, whose first character occurs only once.
    llguidance could also negate an expression, but a grammar with a negation is compiled in a process first."""
    first, rest = _char(tag[0]), list(map(_char, tag[1:]))
    starts = "|".join("".join(rest[:length]) for length in range(len(rest)))
    failed = "|".join(f"{''.join(rest[:length])}[^{char}{first}]" for length, char in enumerate(rest))
    again = f"{first}(?:(?:{starts}){first})*"
    return f"(?:[^{first}]|{again}(?:{failed}))*(?:{again}(?:{starts}))?"


def _char(char: str) -> str:
    if char.isalnum() or char == " ":
        return char
    return f"\\x{{{ord(char):x}}}"


class _Converter:
    """Converts a pattern piece by piece."""

    def __init__(self) -> None:
        self._alternatives: list[str] = []
        """Complete alternatives of the pattern."""
        self._out: list[str] = []
        """Pieces of the current alternative."""
        self._starts, self._ends = False, False
        """True if the current alternative is anchored at the start or the end."""
        self._depth = 0
        self._in_class: list[str] | None = None
        """Pieces of the current class; None outside of classes."""
        self._may_have_tags = False

    def result(self) -> StringRegex:
        if self._in_class is not None or self._depth:
            raise Unsupported("a group or a class does not end")
        self._end_alternative()
        return StringRegex(f"(?:{'|'.join(self._alternatives)})", self._may_have_tags)

    def add(self, found: re.Match[str]) -> None:
        piece = found[0]
        code = found["braces"] or found["unicode"] or found["hex"]
        if (self._ends and piece != "|") or (self._ends and self._depth):
            raise Unsupported("'$' is supported only at the end of a pattern")
        if code is not None or piece == r"\0":
            self._add_char(int(code or "0", 16))
        elif piece[0] == "\\":
            self._add_escape(piece)
        elif self._in_class is not None:
            self._add_to_class(piece)
        else:
            self._add_sign(piece)

    def _add_char(self, code: int) -> None:
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise Unsupported("half of a surrogate pair, or a number that is not a character")
        self._may_have_tags |= chr(code) == TAG_START
        self._put(f"\\x{{{code:x}}}")

    def _add_escape(self, piece: str) -> None:
        kind = piece[1:2]
        if kind.lower() in _CLASSES:
            self._may_have_tags |= kind.isupper()
            chars = _CLASSES[kind.lower()]
            self._put(f"[^{chars}]" if kind.isupper() else chars if self._in_class is not None else f"[{chars}]")
        elif kind in _CONTROLS:
            self._add_char(ord(_CONTROLS[kind]))
        elif kind == "b" and self._in_class is not None:
            self._add_char(8)
        elif kind in "pP" and len(piece) > 2:
            self._may_have_tags = True
            self._put(piece)
        elif (kind.isascii() and kind.isalnum()) or not kind:
            raise Unsupported(f"'{piece}' is not supported")
        else:
            self._add_char(ord(kind))

    def _add_to_class(self, piece: str) -> None:
        assert self._in_class is not None
        if piece == "^" and not self._in_class:
            self._in_class.append("^")
            self._may_have_tags = True
        elif piece == "]":
            chars, self._in_class = "".join(self._in_class), None
            if not chars:
                raise Unsupported("a class without characters")
            self._may_have_tags |= "-" in _SAFE_RANGE.sub("", chars).strip("-")
            self._put(_ANYTHING if chars == "^" else f"[{chars}]")
        elif len(piece) > 1:  # what is a group or a number of repetitions elsewhere
            for char in piece:
                self._add_to_class(char)
        elif piece == "-":
            self._in_class.append("-" if self._in_class else r"\-")
        else:
            self._may_have_tags |= piece == TAG_START
            self._in_class.append(piece if piece.isalnum() else f"\\x{{{ord(piece):x}}}")

    def _add_sign(self, piece: str) -> None:
        match piece:
            case "[":
                self._in_class = []
            case "^" if not self._out and not self._depth:
                self._starts = True
            case "$":
                self._ends = True
            case "|" if not self._depth:
                self._end_alternative()
            case ")" if self._depth:
                self._depth -= 1
                self._put(")")
            case ".":
                self._may_have_tags = True
                self._put(r"[^\n\r\x{2028}\x{2029}]")
            case "|" | "*" | "+" | "?":
                self._put(piece)
            case _:
                self._add_group(piece)

    def _add_group(self, piece: str) -> None:
        """Adds the start of a group, a number of repetitions, or a character that stands for itself."""
        if piece in ("(", "(?:") or (piece.startswith("(?<") and piece.endswith(">")):
            self._depth += 1
            self._put("(?:")
        elif piece == "^":
            raise Unsupported("'^' is supported only at the start of a pattern")
        elif piece.startswith("(?"):
            raise Unsupported(f"'{piece}' is not supported")
        elif piece == ")":
            raise Unsupported("a group does not start")
        elif len(piece) > 1:
            self._put(piece)
        else:
            self._add_char(ord(piece))

    def _put(self, text: str) -> None:
        (self._out if self._in_class is None else self._in_class).append(text)

    def _end_alternative(self) -> None:
        before = "" if self._starts else f"{_ANYTHING}*"
        after = "" if self._ends else f"{_ANYTHING}*"
        self._may_have_tags |= bool(before or after)
        self._alternatives.append(f"{before}(?:{''.join(self._out)}){after}")
        self._out, self._starts, self._ends = [], False, False


_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9][0-9]|00[1-9][0-9]|000[1-9])"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
DATE: Final = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
"""Days of the calendar from year 1 on."""
TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
"""Times as Python parses them (ISO 8601), with an offset as in RFC 3339."""
# At most 63 characters, no hyphen at either end, and no two hyphens at the third and fourth place, as in `xn--`.
_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)
HOSTNAME: Final = rf"{_LABEL}(?:\.{_LABEL})*"
MAX_HOST_CHARS: Final = 253


def _formats() -> Iterator[tuple[str, str]]:
    yield from (("date", DATE), ("time", TIME), ("date-time", f"{DATE}T{TIME}"), ("hostname", HOSTNAME))
    atom = r"[a-zA-Z0-9!#$%\x{26}'*\x{2b}\x{2f}=?^_`{|}\x{7e}-]{1,20}"
    yield "email", rf"{atom}(?:\x{{2e}}{atom}){{0,2}}@{_LABEL}(?:\x{{2e}}{_LABEL}){{1,3}}"
    octet = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
    ipv4 = rf"(?:{octet}\x{{2e}}){{3}}{octet}"
    yield "ipv4", ipv4
    part = "[0-9a-fA-F]{1,4}"
    short = (f"(?:{part}(?::{part}){{0,{before}}})?::(?:{part}(?::{part}){{0,{5 - before}}})?" for before in range(6))
    last = f"(?:(?:{part}:){{6}}{ipv4})"
    yield "ipv6", f"(?:(?:{part}:){{7}}{part}|{'|'.join(short)}|{last})"
    yield "uuid", "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    char = r"(?:[a-zA-Z0-9._\x{7e}!$\x{26}'()*\x{2b},;=:@-]|%[0-9a-fA-F]{2})"
    path = rf"{char}*(?:\x{{2f}}{char}*)*"
    authority = rf"\x{{2f}}\x{{2f}}(?:{HOSTNAME}|{ipv4})(?::[0-9]{{1,5}})?(?:\x{{2f}}{char}*)*"
    more = rf"(?:{char}|[\x{{2f}}?])*"
    yield "uri", rf"[a-zA-Z][a-zA-Z0-9\x{{2b}}.-]*:(?:{authority}|{char}{path})(?:\?{more})?(?:#{more})?"
    days = "[0-9]{1,4}D"
    months = f"[0-9]{{1,4}}M(?:{days})?"
    seconds = "[0-9]{1,4}S"
    minutes = f"[0-9]{{1,4}}M(?:{seconds})?"
    clock = f"T(?:[0-9]{{1,4}}H(?:{minutes})?|{minutes}|{seconds})"
    calendar = f"(?:[0-9]{{1,4}}Y(?:{months})?|{months}|{days})"
    yield "duration", f"P(?:{calendar}(?:{clock})?|{clock}|[0-9]{{1,4}}W)"


FORMATS: Final = {name: StringRegex(source) for name, source in _formats()}
ALIASES: Final = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
"""Formats that have the stricter format for ASCII in their place."""
ONLY_IN_JSON: Final = frozenset(
    ["iri-reference", "json-pointer", "relative-json-pointer", "uri-reference", "uri-template"]
)
"""Formats that are enforced in JSON and not here. All others are annotations."""
MAX_CHARS: Final = {"hostname": MAX_HOST_CHARS}
"""Maximum number of characters of a format's strings, if the regular expression does not limit it."""
