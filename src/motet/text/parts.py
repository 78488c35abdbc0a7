"""What the text of a choice is made of: what it thinks, what it says, and the tools it calls.

    text of tokens ─► AnswerParser ─► parts          one parser a choice, made by the AnswerFormat of the request

A parser holds back what may still become a tag. Its parts do not depend on where the text was cut.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolCallBegin(msgspec.Struct, frozen=True, gc=False):
    number: int
    """Of the call inside its choice, from 0."""
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
        """Of those that were fed."""
        ...

    @property
    def called(self) -> bool:
        """Whether tool calls were told, and all of them are whole."""
        ...

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """`text` comes next; `token_ids` are those whose text is shown with it, often one, none at times."""
        ...

    def close(self, *, cut: bool) -> list[Part]:
        """The answer is over: what is still held back. `cut`: not by the model, so what has begun may lack its end."""
        ...


class AnswerFormat(Protocol):
    """How the choices of one request are to be read."""

    @property
    def visible(self) -> frozenset[int]:
        """Special tokens whose text the parser must see, whether or not special tokens are skipped."""
        ...

    def parser(self) -> AnswerParser: ...
