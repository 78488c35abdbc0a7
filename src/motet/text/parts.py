"""The parts of a choice's text: what it thinks, what it says, and the tools that it calls.

    text of tokens ─► AnswerParser ─► parts          one parser a choice, made by the AnswerFormat of the request

A parser holds back text that may still become a tag. Its parts do not depend on where the text was cut.
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
    """The call's number inside its choice, from 0."""
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of a call that has begun; all pieces, joined, are one JSON object."""

    number: int
    text: str


Part = Content | Reasoning | ToolCallBegin | ToolCallArguments


class AnswerParser(Protocol):
    """Reads the answer of one choice, token by token."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts among those that were fed."""
        ...

    @property
    def called(self) -> bool:
        """True if tool calls were shown, and all of them are whole."""
        ...

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """Takes the next text. `token_ids`: the tokens whose text it is, often one, sometimes none."""
        ...

    def close(self, *, cut: bool) -> list[Part]:
        """Returns what is still held back at the end. `cut`: the model did not end the answer itself."""
        ...


@dataclass(frozen=True)
class AnswerFormat:
    """How the choices of one request are read."""

    parser: Callable[[], AnswerParser]
    """Makes the parser of one choice."""
    visible: frozenset[int]
    """Special tokens whose text the parser must see, whether or not special tokens are skipped."""
