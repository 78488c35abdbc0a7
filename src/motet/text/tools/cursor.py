"""Parses a text that can still grow, from left to right.

Parsing ends in two ways: the text has ended where more text could follow (`EndOfText`), or the text is not a call,
whatever text follows (`NotACall`).
"""

import json
import re
from dataclasses import dataclass


class EndOfText(Exception):
    """The text ends here, and has no error up to this point."""


class NotACall(Exception):
    """The text is not a call, and no continuation can make it one."""


@dataclass(frozen=True)
class TextSpan:
    """The text from `start` to `end` (exclusive). If it is not complete, `end` is the end of the text."""

    start: int
    end: int
    complete: bool


_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_COMPLETE_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_PARTIAL_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][-+]?[0-9]*)?)?|[eE][-+]?[0-9]*)?)?")
_ANY_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")

# First characters that are allowed next in JSON: { stands for an opening bracket, } for a closing one, 0 for a number
# or a word.
_KINDS = {"[": "{", "]": "}"} | {char: char for char in '{}",:'}
VALUE, FIRST_ITEM, KEY, FIRST_KEY, COLON, AFTER_VALUE = '"{0', '"{0}', '"', '"}', ":", ",}"


class Cursor:
    """A position in a text. Each method parses from the position on, and advances it."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        self.text = text
        self.position = 0
        self.final = final
        """True if no more text can come."""

    def at_end(self) -> bool:
        return self.position >= len(self.text)

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.position)
        self.position = match.end() if match else self.position

    def peek(self) -> str:
        """Returns the next character without advancing. Raises `EndOfText` if there is none."""
        if self.at_end():
            raise EndOfText
        return self.text[self.position]

    def accept(self, literal: str) -> bool:
        """Advances past `literal` and returns True if the text continues with it. Raises `EndOfText` if the rest of the
        text is the start of `literal`."""
        if self.text.startswith(literal, self.position):
            self.position += len(literal)
            return True
        if literal.startswith(self.text[self.position : self.position + len(literal)]):
            raise EndOfText
        return False

    def expect(self, literal: str) -> None:
        """Advances past `literal`. Raises `NotACall` if the text does not continue with it."""
        if not self.accept(literal):
            raise NotACall

    def expect_all(self, *literals: str) -> None:
        """Advances past these literals, with any white space before and between them."""
        for literal in literals:
            self.skip_space()
            self.expect(literal.strip())

    def read_until(self, *stops: str) -> str:
        """Returns the text before the first of `stops`. Raises `EndOfText` if there is none of them."""
        ends = [end for stop in stops if (end := self.text.find(stop, self.position)) >= 0]
        if not ends:
            raise EndOfText
        start, self.position = self.position, min(ends)
        return self.text[start : self.position]

    def read_value(self) -> TextSpan:
        """Returns the span of the JSON value that starts here. Strings in it can contain control characters."""
        partial = TextSpan(self.position, len(self.text), complete=False)
        expected, closing = VALUE, list[str]()
        while True:
            self.skip_space()
            if self.at_end():
                return partial
            char = self.text[self.position]
            kind = _KINDS.get(char, "0")
            if kind not in expected:
                raise NotACall
            if kind in '"0':
                if not (self._read_string() if kind == '"' else self._read_scalar()):
                    return partial
                expected = COLON if expected in (KEY, FIRST_KEY) else AFTER_VALUE
            else:
                self.position += 1
                expected = _expected_after(char, closing)
            if not closing and expected == AFTER_VALUE:
                return TextSpan(partial.start, self.position, complete=True)

    def _read_string(self) -> bool:
        """Advances past a string. Returns False if it is not complete."""
        match = _STRING.match(self.text, self.position)
        self.position = match.end() if match else self.position
        if self.at_end():
            return False
        if self.text[self.position] == '"':
            self.position += 1
            return True
        if _PARTIAL_ESCAPE.fullmatch(self.text, self.position):
            return False
        raise NotACall

    def _read_scalar(self) -> bool:
        """Advances past a number or a word. Returns False at the end of the text, since more of it can follow: only the
        next character shows its end."""
        match = _SCALAR.match(self.text, self.position)
        word = match[0] if match else ""
        if self.position + len(word) == len(self.text):
            if _PARTIAL_NUMBER.fullmatch(word) or any(name.startswith(word) for name in ("true", "false", "null")):
                return False
        elif _COMPLETE_SCALAR.fullmatch(word):
            self.position += len(word)
            return True
        raise NotACall


def _expected_after(mark: str, closing: list[str]) -> str:
    """Returns the characters that are allowed after a bracket, comma or colon. `closing`: missing closing brackets."""
    match mark:
        case "{":
            closing.append("}")
            return FIRST_KEY
        case "[":
            closing.append("]")
            return FIRST_ITEM
        case "," | ":":
            return KEY if (mark, closing[-1]) == (",", "}") else VALUE
    if closing.pop() != mark:
        raise NotACall
    return AFTER_VALUE


def repaired(text: str) -> str:
    """Escapes line breaks and other control characters in the strings of complete or partial JSON."""
    if not _CONTROL.search(text):
        return text
    return _ANY_STRING.sub(lambda string: _CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], string[0]), text)


def decoded(text: str) -> object:
    """Decodes JSON, with numbers of any size and halves of surrogate pairs, since grammars allow both. Raises
    `NotACall`."""

    def reject(name: str) -> object:  # NaN and infinities
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=reject)
    except (ValueError, RecursionError) as exc:
        raise NotACall from exc


def is_encodable(text: str) -> bool:
    """Returns True if the text has no half of a surrogate pair, which UTF-8 cannot encode."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
