"""What a request asks its choices to be: a grammar, as the client wrote it. It is compiled where it is used."""

from enum import StrEnum

import msgspec


class GrammarKind(StrEnum):
    """In which language a grammar is written."""

    JSON = "json"
    """A JSON Schema."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON array of the strings that are allowed."""
    LARK = "lark"
    """llguidance's kind of Lark, with `%json` and `<special>` in it."""


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model writes around its thoughts before it answers."""

    open: str
    close: str
    opened: bool
    """The prompt ends behind the opening tag already."""
    before_answer: str = ""
    """Stands there whether it has thought or not."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What every choice of a group must be, from its first token to the end."""

    kind: GrammarKind
    source: str
    thinking: Thinking | None = None
    """What may stand before it."""
