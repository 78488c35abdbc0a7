"""The value of an answer: the piece of its text that is compared with the values of other answers.

A rule finds the piece, and `normalised` converts it to one form, so that "$1,000.50" and "1000.5" are the same value.

Rules run on the server's event loop, and clients write the patterns. So every rule reads a bounded part at the end of a
text, and takes at most about 10 ms (`MAX_WORK`).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

import msgspec
import re2

MAX_TEXT_CHARS: Final = 64 * 1024
"""Number of characters that rules read at the end of a text. A longer text is not read as JSON."""
MAX_VALUE_CHARS: Final = 4 * 1024
"""Maximum length of a value. A longer piece is not a value, since a group stores the values of all its choices."""
MAX_PATTERN_CHARS: Final = 1_000
MAX_POINTER_CHARS: Final = 1_000
MAX_INSTRUCTIONS: Final = 500
"""Maximum number of instructions of a compiled RE2 pattern. `\\pL`, the letters of all languages, has about 1,200."""
MAX_GROUPS: Final = 10
"""Maximum number of groups of a pattern. RE2 stores the match of each group for each way in which a text can match."""
MAX_WORK: Final = 1_000_000
"""Maximum number of instructions times bytes of text. RE2 is slowest if its automaton has too many states, as for
`[ab]*a[ab]{20}c`: it then tries all instructions at each byte, which takes 5 to 12 ns for each instruction."""
PATTERN_MEMORY_BYTES: Final = 256 * 1024
"""Maximum memory of a compiled pattern. It also bounds the time to compile one, such as `\\pL{1000}`, to about 5 ms."""
MAX_NESTING: Final = 100
"""Maximum depth of arrays and objects in an answer that is JSON."""


class ExtractError(ValueError):
    """Raised if the pattern or the pointer of a rule cannot be used. The message has the reason and the limits."""


class ExtractKind(StrEnum):
    """The rule that finds the value in the text of an answer."""

    LAST_LINE = "last_line"
    """The last line that is not blank."""
    LAST_NUMBER = "last_number"
    """The longest number that ends with the last digit. `normalised` defines numbers. A sign is part of the number only
    if no letter, digit or closing bracket precedes it: the last number of "10-5" is 5."""
    BOXED = "boxed"
    """The contents of the last LaTeX `\\boxed{...}`, as in the MATH data set. No value if it is not closed."""
    REGEX = "regex"
    """The first group of the first match of an RE2 pattern, or the complete match if the pattern has no group.

    Rules use the first match and not the last one, because finding all matches can take time quadratic in the length of
    the text, even with RE2. A pattern that starts with `(?s).*` finds the last one: `(?s).*answer is (\\d+)`.

    A pattern with up to 15 instructions reads 64 KiB of UTF-8 at the end of the text, a pattern with 500 reads 2,000
    bytes (`MAX_WORK`). `^` and `\\A` match at the start of this part."""
    JSON_POINTER = "json_pointer"
    """The value that a JSON pointer (RFC 6901) finds in an answer that is JSON: the text of a string, and compact JSON
    with sorted keys for anything else. Numbers are normalised; numbers with exponents stay unchanged."""


@dataclass(frozen=True)
class Extract:
    """A rule that finds values. Raises `ExtractError` if its pattern or pointer cannot be used."""

    kind: ExtractKind
    source: str = ""
    """Pattern or pointer; empty for the other kinds."""
    _find: Callable[[str], str | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_find", _finder(self.kind, self.source))

    def value(self, text: str) -> str | None:
        """Returns the normalised value of an answer; None if it has no value."""
        found = self._find(text)
        return None if found is None else normalised(found)


def _finder(kind: ExtractKind, source: str) -> Callable[[str], str | None]:
    match kind:
        case ExtractKind.LAST_LINE:
            return last_line
        case ExtractKind.LAST_NUMBER:
            return last_number
        case ExtractKind.BOXED:
            return last_boxed
        case ExtractKind.REGEX:
            return Pattern(source).find
        case ExtractKind.JSON_POINTER:
            return partial(find_in_json, pointer=parsed_pointer(source))


SIGNS: Final = "+\\-\u2212"
"""Signs of a number, within brackets of a pattern; the last one is the minus of Unicode."""
NUMBER: Final = re.compile(
    rf"([{SIGNS}]?) \$? ([0-9]{{1,3}}(?:,[0-9]{{3}})+ | [0-9]+ | (?=\.[0-9])) (?:\.([0-9]*))? %?", re.VERBOSE
)


def normalised(piece: str) -> str | None:
    """Returns a piece of text in the form in which values are compared; None if it is blank or too long.

    White space at both ends is removed, and other white space becomes one space. Upper and lower case stay different.
    If the piece is a number, `+`, commas, `$`, `%`, redundant zeros and a point without decimals are removed; minus
    zero is 0. A number consists of an optional sign (+, -, or Unicode's minus), an optional `$`, digits with a comma at
    every thousand or without commas, an optional point with decimals, and an optional `%`. Digits before the point or
    after it can be missing."""
    words = " ".join(piece.split())
    if not words or len(words) > MAX_VALUE_CHARS:
        return None
    if (number := NUMBER.fullmatch(words)) is None:
        return words
    sign, whole, decimals = number.groups(default="")
    whole, decimals = whole.replace(",", "").lstrip("0") or "0", decimals.rstrip("0")
    absolute = f"{whole}.{decimals}" if decimals else whole
    return f"-{absolute}" if sign not in ("", "+") and absolute != "0" else absolute


def last_line(text: str) -> str:
    return text[-MAX_TEXT_CHARS:].rstrip().rpartition("\n")[2]


NUMBER_BACKWARDS: Final = re.compile(
    rf"""
    (?: [0-9]+ \. (?!\.) (?: (?:[0-9]{{3}},)+ [0-9]{{1,3}} (?![0-9]) | [0-9]+ | (?!\w) )  # with decimals: 05.000,1
      | (?:[0-9]{{3}},)+ [0-9]{{1,3}} (?![0-9])                                           # with commas: 000,1
      | [0-9]+ )
    \$? (?: [{SIGNS}] (?! [\w)\]}}] ) )?
    """,
    re.VERBOSE,
)


def last_number(text: str) -> str | None:
    text = text[-MAX_TEXT_CHARS:]
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    # Read backwards, a number has one end. Twice the length of the longest value is enough to find it.
    found = NUMBER_BACKWARDS.match(text[max(0, end - 2 * MAX_VALUE_CHARS) : end][::-1])
    return None if found is None else found.group()[::-1]


BOX: Final = "\\boxed{"
BRACE: Final = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character, which can be an escaped brace."""
PLAIN_LATEX: Final = {
    "\\!": "",
    "\\,": "",
    "{,}": ",",
    "\\$": "$",
    "\\%": "%",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
}
"""LaTeX that changes only the appearance of a formula, and its replacement in a value."""
ONLY_TEXT: Final = re.compile(r"\\text\{([^{}]*)\}")


def last_boxed(text: str) -> str | None:
    if (start := text.rfind(BOX, max(0, len(text) - MAX_TEXT_CHARS))) < 0:
        return None
    start, depth = start + len(BOX), 1
    for brace in BRACE.finditer(text, start, start + MAX_VALUE_CHARS + 1):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return plain_latex(text[start : brace.start()])
    return None


def plain_latex(formula: str) -> str:
    formula = formula.strip().strip("$").strip()
    for latex, plain in PLAIN_LATEX.items():
        formula = formula.replace(latex, plain)
    only_text = ONLY_TEXT.fullmatch(formula)
    return formula if only_text is None else only_text[1]


class Pattern:
    """An RE2 pattern whose worst case is bounded. RE2 has no look-around and no backreferences, so its time is at most
    proportional to the length of the text times the size of the pattern."""

    def __init__(self, source: str) -> None:
        if not 0 < len(source) <= MAX_PATTERN_CHARS:
            raise ExtractError(f"the pattern has {len(source):,} characters: 1 to {MAX_PATTERN_CHARS:,} are allowed")
        options = re2.Options()
        options.max_mem = PATTERN_MEMORY_BYTES
        options.log_errors = False
        try:
            # Bytes and not str: for each match in a str, the package counts the characters before it.
            self._compiled = re2.compile(source.encode(), options)
        except UnicodeEncodeError as exc:
            raise ExtractError("the pattern is not valid Unicode: it has half of a surrogate pair") from exc
        except re2.error as exc:
            reason = exc.args[0].decode(errors="replace")
            raise ExtractError(
                f"RE2 cannot compile the pattern: {reason}. RE2 has no look-around, as in (?=...) or (?<=...), and no "
                f"backreferences, as in \\1; a repetition is at most {{1000}}, and all of the pattern at most "
                f"{MAX_INSTRUCTIONS:,} instructions when compiled"
            ) from exc
        size, groups = self._compiled.programsize, self._compiled.groups
        if size > MAX_INSTRUCTIONS:
            raise ExtractError(
                f"the pattern is too large when compiled: {size:,} instructions, at most {MAX_INSTRUCTIONS:,}; "
                f"repetitions such as {{100}} and classes such as \\pL make it large"
            )
        if groups > MAX_GROUPS:
            raise ExtractError(f"the pattern has {groups:,} groups, at most {MAX_GROUPS}; (?:...) does not count")
        self.max_bytes = min(MAX_TEXT_CHARS, MAX_WORK // size)
        """Number of bytes that are read at the end of a text."""

    def find(self, text: str) -> str | None:
        # A cut through a character leaves bytes that RE2 does not match as a character.
        data = text[-self.max_bytes :].encode(errors="replace")[-self.max_bytes :]
        found = self._compiled.search(data)
        piece: bytes | None = found.group(1 if self._compiled.groups else 0) if found else None
        return None if piece is None else piece.decode(errors="replace")


def parsed_pointer(source: str) -> tuple[str, ...]:
    """Returns the keys of a JSON pointer, from the outermost to the innermost."""
    if len(source) > MAX_POINTER_CHARS:
        raise ExtractError(f"the JSON pointer has {len(source):,} characters, at most {MAX_POINTER_CHARS:,}")
    if source and not source.startswith("/"):
        raise ExtractError(f"the JSON pointer must be empty or begin with '/', as in '/answer': {source!r}")
    if re.search(r"~(?![01])", source):
        raise ExtractError(f"in a JSON pointer, '~' is written '~0', and '/' in a key is written '~1': {source!r}")
    return tuple(key.replace("~1", "/").replace("~0", "~") for key in source.split("/")[1:])


def _plain_float(digits: str) -> msgspec.Raw:
    """Does the same as `normalised` for a number, faster: JSON allows neither `+` nor zeros before the first digit."""
    digits = digits.lower()
    if "e" not in digits:
        digits = digits.rstrip("0").rstrip(".")
    return msgspec.Raw(b"0" if digits == "-0" else digits.encode())


DECODER: Final = msgspec.json.Decoder(float_hook=_plain_float)
"""Keeps the decimal digits of floats: as binary floats, different numbers with many digits would be equal."""


def find_in_json(text: str, *, pointer: tuple[str, ...]) -> str | None:
    if len(text) > MAX_TEXT_CHARS:
        return None
    try:
        document = DECODER.decode(text.strip())
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    if is_too_deep(document):
        return None
    for key in pointer:
        match document:
            case dict() if key in document:
                document = document[key]
            case list() if is_place(key, length=len(document)):
                document = document[int(key)]
            case _:
                return None
    return document if isinstance(document, str) else msgspec.json.encode(document, order="sorted").decode()


def is_place(key: str, *, length: int) -> bool:
    """Returns True if the key of a JSON pointer is the number of an element, without leading zeros."""
    return re.fullmatch(r"0|[1-9][0-9]{0,5}", key) is not None and int(key) < length


def is_too_deep(document: object) -> bool:
    """Returns True if a document has too many levels. Counts level by level, since Python's recursion limit depends on
    the depth of the caller."""
    level = containers([document])
    for _ in range(MAX_NESTING):
        level = containers(inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
    return bool(level)


def containers(values: Iterable[object]) -> list[dict[str, object] | list[object]]:
    return [value for value in values if isinstance(value, dict | list)]
