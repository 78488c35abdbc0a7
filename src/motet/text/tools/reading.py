"""What all readers of calls share: from calls found one after the other to a `Reading`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from motet.text.tools.base import ReadCall, Reading, Tool
from motet.text.tools.cursor import Cursor, EndOfText, NotACall


@dataclass(frozen=True)
class Found:
    """A call, or (None) what belongs to those before it, and where it ends."""

    call: ReadCall | None
    end: int


def reading_of(found: Iterator[Found], text: str, *, final: bool) -> Reading:
    """`found` raises `EndOfText` where the text ends, and `NotACall` where something else than a call stands."""
    calls: list[ReadCall] = []
    taken, malformed = 0, False
    try:
        for one in found:
            if one.call is not None:
                calls.append(one.call)
            if not calls or calls[-1].whole:
                taken = one.end
    except NotACall:
        malformed = True
    except EndOfText:
        pass
    taken += len(text) - taken - len(text[taken:].lstrip())
    begun = bool(calls) and not calls[-1].whole
    left_over = final and not begun and (not calls or taken < len(text))
    return Reading(tuple(calls), malformed or left_over, taken if any(call.whole for call in calls) else 0)


def known(name: str, tools: Sequence[Tool]) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise NotACall


def named(cursor: Cursor, tools: Sequence[Tool], *stops: str) -> str:
    """The name of a tool, up to one of `stops`; `NotACall` as soon as no tool's name begins so."""
    start = cursor.place
    try:
        name = cursor.until(*stops).strip()
    except EndOfText:
        begun = cursor.text[start:]
        for stop in stops:
            begun = begun.partition(stop[0])[0]  # it may have begun too
        begun = begun.strip()
        if any(tool.name.startswith(begun) for tool in tools):
            raise
        raise NotACall from None
    return known(name, tools).name
