"""The tools of a request, and the parts of a format in which a model calls tools.

A format consists of data and pure functions: the tags around calls, a parser for the text between them, and a grammar
that allows only such calls. For all formats, `text.answers` finds the tags in a stream and sends calls as they arrive:

1. An opening tag starts a region of calls.
2. As the region grows, it is parsed again and again. The parser returns calls that are complete or partial.
3. A closing tag outside a string, or the end of the answer, ends the region.
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

CALL_PREFIX, CALL_ID_CHARS = "call_", 24


def call_id(prefix: str = CALL_PREFIX, length: int = CALL_ID_CHARS) -> str:
    """Returns a random id of a call. The default form is OpenAI's: `call_` and 24 letters and digits."""
    return prefix + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, object]
    """JSON Schema of an object. An empty schema allows any object."""
    strict: bool
    """True if the arguments must follow the schema."""


class ToolMode(StrEnum):
    AUTO = "auto"
    """The model decides whether it calls tools."""
    REQUIRED = "required"
    """The answer consists of at least one call, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class ToolRules:
    """The rules of a request for tool calls. A named `tool_choice` is `required` with this one tool."""

    callable: tuple[Tool, ...]
    """Tools that may be called. The template can show more tools to the model."""
    mode: ToolMode
    parallel: bool = True
    """True if an answer can have more than one call."""


class ParsedCall(msgspec.Struct, frozen=True):
    """A complete call, or the start of a call."""

    name: str
    arguments: str
    """JSON of an object. If the call is not complete, this is the start of the JSON, without the last brace. Further
    text only appends to it."""
    complete: bool


class ParsedRegion(msgspec.Struct, frozen=True):
    """The calls in a region between tags."""

    calls: tuple[ParsedCall, ...] = ()
    """Calls of known tools. Only the last call can be incomplete; at the end of the answer it was then cut off."""
    malformed: bool = False
    """True if the text after the complete calls is not a call, and no continuation can make it one."""
    num_parsed: int = 0
    """Number of characters up to the end of the last complete call."""

    @property
    def complete(self) -> bool:
        """True if there are calls, all of them complete, and no other text."""
        return bool(self.calls) and not self.malformed and all(call.complete for call in self.calls)


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The format in which a family of models calls tools."""

    name: str
    """Name of the format in `--tool-parser`."""
    opening_tags: tuple[str, ...]
    """Tags that open a region of calls."""
    inner_tags: tuple[str, ...] = ()
    """Other tags inside a region. If they are special tokens, the parser needs their text."""
    bare: str | None = None
    """First character of answers that are a region without tags."""
    closing_tags: tuple[str, ...] = ()
    """Tags that close a region; without any, only the end of the answer closes it. A tag inside a string closes
    nothing: for the text up to and including such a tag, `parse` returns a region that is neither malformed nor
    complete."""
    parse: Callable[[Cursor, Sequence[Tool]], ParsedRegion]
    """Parses a region from a cursor at the start of its text, without the outer tags, given the tools that may be
    called. Never raises. `region_parser` makes such a function."""
    grammar: Callable[[ToolRules, Mapping[str, int]], str]
    """Returns a Lark grammar, given the rules and the ids of the model's special tokens by their texts. Its rule
    `start` allows only calls (`required`), or text and calls (`auto`). A tag that is a special token is `<[id]>` in it,
    any other tag a string. Raises `GrammarError` if a grammar for the tools is impossible."""
    template_marks: Sequence[str]
    """A chat template that contains all of these texts uses this format."""
    new_call_id: Callable[[], str] = call_id
    """Makes the id of a call. Some formats have ids of a special form, because templates show them to the model."""

    @cached_property
    def end_tags(self) -> StopStrings:
        return StopStrings(self.closing_tags)


def region_parser(
    parse_calls: Callable[[Cursor, Sequence[Tool]], Iterator[ParsedCall | None]],
) -> Callable[[Cursor, Sequence[Tool]], ParsedRegion]:
    """Makes the `parse` of a format from a generator that advances through a region. The generator yields each call
    once the cursor is after it, and None once the cursor is after other text that belongs to the calls. It raises
    `EndOfText` where the text ends, and `NotACall` where any other text follows."""

    def parse(cursor: Cursor, tools: Sequence[Tool]) -> ParsedRegion:
        calls: list[ParsedCall] = []
        num_parsed, malformed = 0, False
        try:
            for call in parse_calls(cursor, tools):
                if call is not None:
                    calls.append(call)
                if not calls or calls[-1].complete:
                    num_parsed = cursor.position
        except NotACall:
            malformed = True
        except EndOfText:
            pass
        num_parsed = len(cursor.text) - len(cursor.text[num_parsed:].lstrip())
        is_partial = bool(calls) and not calls[-1].complete
        has_other_text = cursor.final and not is_partial and (not calls or num_parsed < len(cursor.text))
        has_complete_call = any(call.complete for call in calls)
        return ParsedRegion(tuple(calls), malformed or has_other_text, num_parsed if has_complete_call else 0)

    return parse


def tool_named(name: object, tools: Sequence[Tool]) -> Tool:
    """Returns the tool of this name. Raises `NotACall` if there is none."""
    for tool in tools:
        if tool.name == name:
            return tool
    raise NotACall


def tool_until(cursor: Cursor, tools: Sequence[Tool], *stops: str) -> Tool:
    """Returns the tool whose name extends to one of `stops`. Raises `NotACall` once no tool's name has this start."""
    start = cursor.position
    try:
        return tool_named(cursor.read_until(*stops).strip(), tools)
    except EndOfText:
        partial_name = cursor.text[start:]
        for stop in stops:
            partial_name = partial_name.partition(stop[0])[0]  # the start of a stop can follow the name
        if any(tool.name.startswith(partial_name.strip()) for tool in tools):
            raise
        raise NotACall from None
