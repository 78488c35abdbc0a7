"""The tools of a request, and the parts of a format in which a model calls them.

A format is data and pure functions: the tags around calls, a reader of the text between them, and a grammar that
allows only such calls. For all formats alike, `text.answers` finds the tags in a stream and shows calls as they come.
"""

import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import msgspec

from motet.text.stop_strings import StopStrings
from motet.text.tools.cursor import Cursor, EndOfText, NotACall


def call_id(prefix: str = "call_", length: int = 24) -> str:
    """Makes an id like OpenAI's: `call_` and 24 letters and digits."""
    return prefix + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, object]
    """A JSON Schema of an object; empty: any object."""
    strict: bool


class ToolMode(StrEnum):
    AUTO = "auto"
    """The model decides whether it calls."""
    REQUIRED = "required"
    """The answer is at least one call, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class ToolRules:
    """The rules of a request for its calls. A named choice is `required` with that one tool."""

    callable: tuple[Tool, ...]
    """The tools that may be called; the template may show more."""
    mode: ToolMode
    parallel: bool = True
    """True if there may be more than one call."""


class ParsedCall(msgspec.Struct, frozen=True):
    """A call as far as it has come."""

    name: str
    arguments: str
    """JSON text of an object. Until `whole` it is a beginning, which more text only makes longer, and without the last
    brace."""
    whole: bool


class ParsedRegion(msgspec.Struct, frozen=True):
    """The calls in a region between tags."""

    calls: tuple[ParsedCall, ...] = ()
    """Calls of known tools. Only the last one may be unfinished; at the end of the answer such a call was cut off."""
    malformed: bool = False
    """True if the text after the whole calls is no call, and no more text can make it one."""
    taken: int = 0
    """Number of characters from the beginning to the end of the last whole call."""

    @property
    def whole(self) -> bool:
        """True if there are calls, all of them whole, and nothing else."""
        return bool(self.calls) and not self.malformed and all(call.whole for call in self.calls)


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family of models writes its calls."""

    name: str
    """The format's name in `--tool-parser`."""
    begins: tuple[str, ...]
    """Tags that open a region of calls."""
    inner: tuple[str, ...] = ()
    """More tags inside a region; if they are special tokens, the parser must see them."""
    bare: str | None = None
    """An answer that begins with this character is a region without tags."""
    ends: tuple[str, ...]
    """Tags that close a region; without any, the end of the answer does. A tag inside a string closes nothing: `read`
    of the text up to and with it, not final, then gives a region that is neither malformed nor whole."""
    read: Callable[[Cursor, Sequence[Tool]], ParsedRegion]
    """(begin of a region's text, without its outer tags; tools that may be called) -> calls. It never raises;
    `region_reader` makes one."""
    grammar: Callable[[ToolRules, Mapping[str, int]], str]
    """(rules; special tokens of the model by their text) -> a Lark grammar whose `start` is only calls (`required`), or
    text and calls (`auto`). A tag is written as `<[id]>` if it is a special token, else as a string. Raises
    `GrammarError` for tools of which it cannot be made."""
    known_by: Sequence[str]
    """A chat template that contains all of these is for this format."""
    new_call_id: Callable[[], str] = call_id
    """Makes the id of a call. Some formats have ids of their own kind, since templates show them to the model."""

    @cached_property
    def end_tags(self) -> StopStrings:
        return StopStrings(self.ends)


def region_reader(
    parse: Callable[[Cursor, Sequence[Tool]], Iterator[ParsedCall | None]],
) -> Callable[[Cursor, Sequence[Tool]], ParsedRegion]:
    """Makes the `read` of a format from a generator that goes through a region.

    The generator yields each call once the cursor is behind it, and None once the cursor is behind something else that
    belongs to the calls. It raises `EndOfText` where the text ends, `NotACall` where anything else follows.
    """

    def read(cursor: Cursor, tools: Sequence[Tool]) -> ParsedRegion:
        calls: list[ParsedCall] = []
        taken, malformed = 0, False
        try:
            for call in parse(cursor, tools):
                if call is not None:
                    calls.append(call)
                if not calls or calls[-1].whole:
                    taken = cursor.place
        except NotACall:
            malformed = True
        except EndOfText:
            pass
        taken = len(cursor.text) - len(cursor.text[taken:].lstrip())
        begun = bool(calls) and not calls[-1].whole
        left_over = cursor.final and not begun and (not calls or taken < len(cursor.text))
        return ParsedRegion(tuple(calls), malformed or left_over, taken if any(call.whole for call in calls) else 0)

    return read


def tool_named(name: object, tools: Sequence[Tool]) -> Tool:
    """Returns the tool of this name. Raises `NotACall` if there is none."""
    for tool in tools:
        if tool.name == name:
            return tool
    raise NotACall


def tool_until(cursor: Cursor, tools: Sequence[Tool], *stops: str) -> Tool:
    """Reads the name of a tool, up to one of `stops`. Raises `NotACall` as soon as no tool's name begins so."""
    start = cursor.place
    try:
        return tool_named(cursor.until(*stops).strip(), tools)
    except EndOfText:
        begun = cursor.text[start:]
        for stop in stops:
            begun = begun.partition(stop[0])[0]  # the name may be followed by the beginning of a stop
        if any(tool.name.startswith(begun.strip()) for tool in tools):
            raise
        raise NotACall from None
