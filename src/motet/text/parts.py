"""The parts of a choice's text: reasoning, content and tool calls.

    text of tokens ─► AnswerParser ─► parts          one parser for each choice, made by the AnswerFormat of the request

A parser holds back text that can still become a tag. Its parts do not depend on where the text is divided.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolCallBegin(msgspec.Struct, frozen=True, gc=False):
    number: int
    """Number of the call in its choice, from 0."""
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of the arguments of a call. All pieces of a call, joined, are one JSON object."""

    number: int
    text: str


Part = Content | Reasoning | ToolCallBegin | ToolCallArguments


def merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Returns the parts with consecutive pieces of the same text joined, so that each becomes one delta."""
    joined: list[Part] = []
    for part in parts:
        match joined[-1] if joined else None, part:
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (ToolCallArguments(number, before), ToolCallArguments(same, text)) if number == same:
                joined[-1] = ToolCallArguments(number, before + text)
            case _:
                joined.append(part)
    return tuple(joined)


class AnswerParser(Protocol):
    """Reads the answer of one choice, token by token."""

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens among the tokens that were fed."""
        ...

    @property
    def called(self) -> bool:
        """True if tool calls were shown, and all of them are complete."""
        ...

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """Takes the next text. `token_ids`: tokens whose text ends in it, often one, sometimes none."""
        ...

    def close(self, *, cut: bool) -> list[Part]:
        """Returns the parts still held back at the end. `cut`: True if the model did not end the answer itself."""
        ...


@dataclass(frozen=True)
class AnswerFormat:
    """The format in which the choices of a request separate their parts."""

    parser: Callable[[], AnswerParser]
    """Makes the parser of one choice."""
    visible: frozenset[int]
    """Special tokens whose text the parser needs, even if special tokens are skipped."""
