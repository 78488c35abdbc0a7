"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, in either order, `parameters` for `arguments`.

What models get wrong, and what is made of it, since it can mean one thing only:

    control characters inside strings (line breaks above all)     escaped
    arguments missing or null                                     {}
    arguments as a string that holds a JSON object                that object
    the text ends (tag or end of answer) before the last brace    a call, if its arguments are whole

Anything else is no call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from motet.text.tools.base import ReadCall, Tool
from motet.text.tools.cursor import Cursor, EndOfText, NotACall, Span, can_be_sent, decoded, repaired
from motet.text.tools.reading import Found, known

ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "id", "type", *ARGUMENTS})


@dataclass(frozen=True)
class _Members:
    """Of an object, as far as they have come."""

    found: dict[str, Span]
    closed: bool


def one_call(cursor: Cursor, tools: Sequence[Tool], *, final: bool, exact: bool = False) -> Iterator[Found]:
    """The object that begins here, as `_object_call` reads it."""
    call = _object_call(cursor, tools, final=final, exact=exact)
    if call is not None:
        yield Found(call, cursor.place)
    if call is None or not call.whole:
        raise EndOfText


def listed_calls(cursor: Cursor, tools: Sequence[Tool], *, final: bool) -> Iterator[Found]:
    """A list of such objects, from its `[` to its `]`."""
    cursor.literal("[")
    while True:
        cursor.space()
        yield from one_call(cursor, tools, final=final)
        cursor.space()
        if cursor.maybe("]"):
            yield Found(None, cursor.place)
            return
        cursor.literal(",")


def arguments_of(cursor: Cursor, name: str) -> Iterator[Found]:
    """A call whose name is known already: the object that begins here is its arguments."""
    cursor.space()
    if cursor.peek() != "{":
        raise NotACall
    span = cursor.value()
    call = _from_object(cursor.text, name, span, closed=True)
    if call is not None:
        yield Found(call, span.end)
    if not span.whole:
        raise EndOfText


def _object_call(cursor: Cursor, tools: Sequence[Tool], *, final: bool, exact: bool = False) -> ReadCall | None:
    """The call written as the object that begins here; None before its name and arguments have begun.

    `exact`: it must have arguments and no keys but those of calls, as it has no tag that says it is one.
    """
    members = _members(cursor, exact=exact)
    name = _name(cursor.text, members.found.get("name"))
    if name is not None:
        known(name, tools)
    elif members.closed:
        raise NotACall
    else:
        return None
    spans = [span for key in ARGUMENTS if (span := members.found.get(key)) is not None]
    if len(spans) > 1:
        raise NotACall
    if not spans:
        if members.closed and not exact:
            return ReadCall(name, "{}", whole=True)
        if members.closed:
            raise NotACall
        return None
    return _from_value(cursor.text, name, spans[0], closed=members.closed or final)


def _from_value(text: str, name: str, span: Span, *, closed: bool) -> ReadCall | None:
    """A call with the arguments in `span`; `closed`: whole arguments make it whole."""
    start = text[span.start]
    if start == "{":
        return _from_object(text, name, span, closed=closed)
    if start not in '"n':
        raise NotACall
    if not span.whole:
        return None
    value = decoded(repaired(text[span.start : span.end]))
    if value is None:
        return ReadCall(name, "{}", whole=True) if closed else None
    if not isinstance(value, str) or not isinstance(decoded(value), dict) or not can_be_sent(value):
        raise NotACall
    return ReadCall(name, value.strip(), whole=True) if closed else None


def _from_object(text: str, name: str, span: Span, *, closed: bool) -> ReadCall | None:
    """None while a brace is all: what follows shows whether that is JSON."""
    written = repaired(text[span.start : span.end])
    if span.whole and closed:
        return ReadCall(name, written, whole=True)
    begun = written[:-1] if span.whole else written
    return ReadCall(name, begun, whole=False) if begun.strip() != "{" else None


def _name(text: str, span: Span | None) -> str | None:
    if span is None or not span.whole:
        return None
    name = decoded(text[span.start : span.end])
    if not isinstance(name, str):
        raise NotACall
    return name


def _members(cursor: Cursor, *, exact: bool) -> _Members:
    cursor.literal("{")
    found: dict[str, Span] = {}
    try:
        closed = _read_members(cursor, found, exact=exact)
    except EndOfText:
        cursor.place = len(cursor.text)
        closed = False
    return _Members(found, closed)


def _read_members(cursor: Cursor, found: dict[str, Span], *, exact: bool) -> bool:
    cursor.space()
    if cursor.peek() == "}":
        cursor.place += 1
        return True
    while True:
        cursor.space()
        if cursor.peek() != '"':
            raise NotACall
        key = _next(cursor)
        name = decoded(repaired(cursor.text[key.start : key.end]))
        if not isinstance(name, str) or name in found or (exact and name not in KEYS):
            raise NotACall
        cursor.space()
        cursor.literal(":")
        cursor.space()
        cursor.peek()
        span = cursor.value()
        found[name] = span
        if not span.whole:
            raise EndOfText
        cursor.space()
        if cursor.maybe("}"):
            return True
        cursor.literal(",")


def _next(cursor: Cursor) -> Span:
    span = cursor.value()
    if not span.whole:
        raise EndOfText
    return span
