"""Reading a text that is still being written, from left to right.

A reader tells two ends apart: the text ended where more could follow (`EndOfText`), and what stands there is no call,
whatever may follow (`NotACall`).
"""

import json
import re
from dataclasses import dataclass


class EndOfText(Exception):
    """So far nothing is wrong."""


class NotACall(Exception):
    """No more text can make it one."""


@dataclass(frozen=True)
class Span:
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
_CLOSING = {"{": "}", "[": "]"}
_CONTROL = re.compile(r"[\x00-\x1f]")


class Cursor:
    """A place in a text that moves on with what is read."""

    def __init__(self, text: str, place: int = 0) -> None:
        self.text = text
        self.place = place

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
        """Whether `literal` stands here; then it is read. `EndOfText` while that is open."""
        if self.text.startswith(literal, self.place):
            self.place += len(literal)
            return True
        if literal.startswith(self.text[self.place : self.place + len(literal)]):
            raise EndOfText
        return False

    def literal(self, literal: str) -> None:
        if not self.maybe(literal):
            raise NotACall

    def until(self, *stops: str) -> str:
        """The text up to the first of `stops`, which are left to be read."""
        ends = [end for stop in stops if (end := self.text.find(stop, self.place)) >= 0]
        if not ends:
            raise EndOfText
        start, self.place = self.place, min(ends)
        return self.text[start : self.place]

    def value(self) -> Span:
        """The JSON value that begins here; control characters may stand in its strings."""
        start, depth = self.place, list[str]()
        while True:
            self.space()
            if self.at_end():
                return Span(start, self.place, whole=False)
            char = self.text[self.place]
            if char in "{[":
                self.place += 1
                depth.append(char)
                self.space()
                if not self.at_end() and self.text[self.place] == _CLOSING[char]:
                    self.place += 1
                    depth.pop()
                elif char == "[" or self._key():
                    continue
                else:
                    return Span(start, len(self.text), whole=False)
            elif not (self._string() if char == '"' else self._scalar()):
                return Span(start, len(self.text), whole=False)
            if not self._close(depth):
                return Span(start, len(self.text), whole=False)
            if not depth:
                return Span(start, self.place, whole=True)

    def _close(self, depth: list[str]) -> bool:
        """After a value: brackets that close, and what stands before the next value. False at the end of the text."""
        while depth:
            self.space()
            if self.at_end():
                return False
            char = self.text[self.place]
            self.place += 1
            if char == _CLOSING[depth[-1]]:
                depth.pop()
            elif char == ",":
                return depth[-1] == "[" or self._key()
            else:
                raise NotACall
        return True

    def _key(self) -> bool:
        """A key and its colon; False if the text ends before."""
        self.space()
        if self.at_end():
            return False
        if self.text[self.place] != '"':
            raise NotACall
        if not self._string():
            return False
        self.space()
        if self.at_end():
            return False
        self.literal(":")
        return True

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
        """False while more of it may come: its end shows only by what follows."""
        match = _SCALAR.match(self.text, self.place)
        word = match[0] if match else ""
        if self.place + len(word) == len(self.text):
            if _NUMBER_BEGUN.fullmatch(word) or any(name.startswith(word) for name in ("true", "false", "null")):
                return False
        elif _WHOLE_SCALAR.fullmatch(word):
            self.place += len(word)
            return True
        raise NotACall


def repaired(text: str) -> str:
    """JSON, or a beginning, whose strings may hold line breaks and other control characters as they are: escaped."""
    if not _CONTROL.search(text):
        return text
    return _ANY_STRING.sub(lambda string: _CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], string[0]), text)


def decoded(text: str) -> object:
    """Raises `NotACall` for what is no JSON. Numbers of any size are, and halves of surrogate pairs, as in grammars."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise NotACall from exc


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def can_be_sent(text: str) -> bool:
    """Whether it is all characters: half of a surrogate pair is none."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
