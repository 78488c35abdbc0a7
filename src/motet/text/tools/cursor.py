"""Reads a text that is still being written, from left to right.

Reading stops in two ways: the text has ended where more could follow (`EndOfText`), or it is no call, whatever may
follow (`NotACall`).
"""

import json
import re
from dataclasses import dataclass


class EndOfText(Exception):
    """The text ends here, and nothing is wrong so far."""


class NotACall(Exception):
    """The text is no call, and no more text can make it one."""


@dataclass(frozen=True)
class TextSpan:
    """`text[start:end]`; it ends with the text where it is not `whole`."""

    start: int
    end: int
    whole: bool


_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_WHOLE_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][-+]?[0-9]*)?)?|[eE][-+]?[0-9]*)?)?")
_ANY_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")

# What may come next in JSON, by its first character: { is an opening bracket, } a closing one, 0 a number or a word.
_KINDS = {"[": "{", "]": "}"} | {char: char for char in '{}",:'}
VALUE, FIRST_ITEM, KEY, FIRST_KEY, COLON, BEHIND = '"{0', '"{0}', '"', '"}', ":", ",}"


class Cursor:
    """A place in a text, which moves on as the text is read."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        self.text = text
        self.place = 0
        self.final = final
        """True if no more text can come."""

    def at_end(self) -> bool:
        return self.place >= len(self.text)

    def space(self) -> None:
        match = _SPACE.match(self.text, self.place)
        self.place = match.end() if match else self.place

    def peek(self) -> str:
        if self.at_end():
            raise EndOfText
        return self.text[self.place]

    def maybe(self, literal: str) -> bool:
        """Reads `literal` if it is next, and returns True then. Raises `EndOfText` if more text could complete it."""
        if self.text.startswith(literal, self.place):
            self.place += len(literal)
            return True
        if literal.startswith(self.text[self.place : self.place + len(literal)]):
            raise EndOfText
        return False

    def literal(self, literal: str) -> None:
        if not self.maybe(literal):
            raise NotACall

    def pass_over(self, *texts: str) -> None:
        """Reads these texts, with any white space before and between them."""
        for text in texts:
            self.space()
            self.literal(text.strip())

    def until(self, *stops: str) -> str:
        """Reads up to the first of `stops`, without it."""
        ends = [end for stop in stops if (end := self.text.find(stop, self.place)) >= 0]
        if not ends:
            raise EndOfText
        start, self.place = self.place, min(ends)
        return self.text[start : self.place]

    def value(self) -> TextSpan:
        """Reads the JSON value that begins here; its strings may contain control characters."""
        unfinished = TextSpan(self.place, len(self.text), whole=False)
        expected, closing = VALUE, list[str]()
        while True:
            self.space()
            if self.at_end():
                return unfinished
            char = self.text[self.place]
            kind = _KINDS.get(char, "0")
            if kind not in expected:
                raise NotACall
            if kind in '"0':
                if not (self._string() if kind == '"' else self._scalar()):
                    return unfinished
                expected = COLON if expected in (KEY, FIRST_KEY) else BEHIND
            else:
                self.place += 1
                expected = _behind(char, closing)
            if not closing and expected == BEHIND:
                return TextSpan(unfinished.start, self.place, whole=True)

    def _string(self) -> bool:
        match = _STRING.match(self.text, self.place)
        self.place = match.end() if match else self.place
        if self.at_end():
            return False
        if self.text[self.place] == '"':
            self.place += 1
            return True
        if _ESCAPE_BEGUN.fullmatch(self.text, self.place):
            return False
        raise NotACall

    def _scalar(self) -> bool:
        """Reads a number or a word. Returns False while more of it may come: only the next character shows its end."""
        match = _SCALAR.match(self.text, self.place)
        word = match[0] if match else ""
        if self.place + len(word) == len(self.text):
            if _NUMBER_BEGUN.fullmatch(word) or any(name.startswith(word) for name in ("true", "false", "null")):
                return False
        elif _WHOLE_SCALAR.fullmatch(word):
            self.place += len(word)
            return True
        raise NotACall


def _behind(mark: str, closing: list[str]) -> str:
    """Returns what may follow a bracket, comma or colon. `closing`: the brackets that are still to come."""
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
    return BEHIND


def repaired(text: str) -> str:
    """Escapes line breaks and other control characters in the strings of JSON, or of its beginning."""
    if not _CONTROL.search(text):
        return text
    return _ANY_STRING.sub(lambda string: _CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], string[0]), text)


def decoded(text: str) -> object:
    """Reads JSON, with numbers of any size and halves of surrogate pairs, as in grammars. Raises `NotACall`."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise NotACall from exc


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def can_be_sent(text: str) -> bool:
    """Returns True if the text has no half of a surrogate pair, which cannot be sent."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
