"""The tools of a request, and what a model's way of calling them is made of.

A format is data and pure functions: the tags around its calls, how what stands between them is read, and the grammar
that allows nothing else. Finding tags in a stream, and telling of calls as they come, is done for all of them in one
place (`text.tags`, `text.answers`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, object]
    """A JSON Schema of an object; empty: any object."""
    strict: bool


class ToolMode(StrEnum):
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """One call at least, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class ToolRules:
    """What a request that may call tools says of them. A named choice is `required` with that one tool."""

    callable: tuple[Tool, ...]
    """Those that may be called; the template may have been told of more."""
    mode: ToolMode
    parallel: bool = True
    """Whether there may be more than one call."""


class ReadCall(msgspec.Struct, frozen=True):
    """A call as far as it has come."""

    name: str
    arguments: str
    """JSON text of an object. Until `whole`: a beginning that more text can only make longer, and never an object by
    itself (its last brace comes with `whole`)."""
    whole: bool


class Reading(msgspec.Struct, frozen=True):
    """What a region between tags says."""

    calls: tuple[ReadCall, ...] = ()
    """Of known tools only. The last one alone may be unfinished; at the end of the text that is a call cut off."""
    malformed: bool = False
    """What comes after the whole ones among `calls` is no call, and no more text can make it one."""
    taken: int = 0
    """Characters that the whole ones among `calls` take up, from the beginning."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family of models writes its calls."""

    name: str
    """As in `--tool-parser`."""
    begins: tuple[str, ...]
    """Tags that open a region of calls."""
    inner: tuple[str, ...] = ()
    """More tags that stand inside a region; special tokens among them must be seen too."""
    bare: str | None = None
    """An answer that begins with this character is a region without tags."""
    ends: tuple[str, ...]
    """Tags that close a region; none: the end of the answer does. One that stands in a string closes nothing: then
    `read` of the text with the tag, not final, is neither malformed nor are all its calls whole."""
    read: Callable[[str, bool, Sequence[Tool]], Reading]
    """(text of a region, outer tags left out; whether it is all there is; tools that may be called) -> calls.
    Pure, and never raises."""
    grammar: Callable[[ToolRules, Mapping[str, int]], str]
    """(rules; special tokens of the model by their text) -> Lark whose `start` is: calls alone (`required`), or text
    and calls (`auto`). A tag that is a special token stands in it as `<[id]>`, any other as a string. Raises
    `GrammarError` for tools that it cannot be made of."""
    known_by: Sequence[str]
    """A chat template that holds all of these is for it."""
    new_call_id: Callable[[], str]
