"""From a request's `Grammar` to the JSON that llguidance compiles. Pure: nothing here knows a vocabulary but for the
ids of its special tokens.
"""

import re
from collections.abc import Mapping

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from motet.constraint import Grammar, GrammarKind, Thinking
from motet.errors import GrammarError
from motet.grammar.lark import literal, prepared_lark
from motet.grammar.limits import MAX_LEVELS, MAX_SOURCE_CHARS, MAX_TEXT_CHARS
from motet.grammar.schema import read_schema

WHITESPACE = r" {1,2}|\r?\n[ \t]{0,40}"
"""What may stand once between two parts of JSON: up to two spaces, or a line's end and an indentation.

Bounded, as a small model otherwise writes whitespace for ever; wide enough for what `json.dumps(indent=2)` writes, to a
depth of 20.
"""

ANSWER = "answer"
BLANK = r"/[ \t\r\n]{1,4}/"


class _Part(msgspec.Struct, omit_defaults=True):
    """One of the grammars that llguidance compiles together; the first is where it starts."""

    name: str | None = None
    lark_grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.Raw(b"null")


class _Parts(msgspec.Struct):
    grammars: list[_Part]


def llguidance_source(grammar: Grammar, special: Mapping[str, int]) -> str:
    """`special`: text of each special token -> its id. Raises `GrammarError`."""
    if len(grammar.source) > MAX_SOURCE_CHARS:
        raise GrammarError(f"it has {len(grammar.source)} characters, and {MAX_SOURCE_CHARS} are allowed")
    parts = [_answer(grammar, special)]
    if grammar.thinking is not None:
        parts.insert(0, _Part(lark_grammar=thinking_first(grammar.thinking, special)))
    return msgspec.json.encode(_Parts(parts)).decode()


def schema_source(schema: Mapping[str, object]) -> str:
    """Of a schema that has been read already."""
    return msgspec.json.encode(_Parts([_Part(json_schema=msgspec.Raw(_with_whitespace(schema)))])).decode()


def _answer(grammar: Grammar, special: Mapping[str, int]) -> _Part:
    if grammar.kind is GrammarKind.JSON:
        return _Part(ANSWER, json_schema=msgspec.Raw(_with_whitespace(read_schema(grammar.source))))
    return _Part(ANSWER, lark_grammar=_lark(grammar, special))


def _with_whitespace(schema: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema})


def prepared_schema(source: str) -> str:
    """For `%json`: checked, and with bounded whitespace."""
    return _with_whitespace(read_schema(source)).decode()


def _lark(grammar: Grammar, special: Mapping[str, int]) -> str:
    match grammar.kind:
        case GrammarKind.REGEX:
            _check_length(grammar.source)
            return f"start: /{regex_to_lark(grammar.source, use_ascii='')}/"
        case GrammarKind.CHOICE:
            return _choices(grammar.source)
        case GrammarKind.LARK:
            return prepared_lark(lark_of(grammar.source), special, prepared_schema)
        case GrammarKind.JSON:
            return f"start: %json {prepared_schema(grammar.source)}"


def _choices(source: str) -> str:
    """All in one terminal: as alternatives of a rule, each would be an item of the parser."""
    choices = msgspec.json.decode(source, type=list[str])
    for choice in choices:
        _check_length(choice)
    return f"start: CHOICE\nCHOICE: {' | '.join(map(literal, choices))}"


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise GrammarError(f"it has {len(text)} characters, and {MAX_TEXT_CHARS} are allowed")


def lark_of(source: str) -> str:
    """Lark as it is; llama.cpp's GBNF, and the EBNF that looks like it, made into Lark."""
    num_rules = source.count("::=")
    if num_rules > MAX_LEVELS:  # converting takes the square of them
        raise GrammarError(f"it has {num_rules} rules, and {MAX_LEVELS} are allowed")
    try:
        return any_to_lark(source)
    except Exception as exc:  # the library's own class derives from Exception, and its bugs are of any
        raise GrammarError(f"it is neither Lark nor GBNF: {exc}") from exc


def thinking_first(thinking: Thinking, special: Mapping[str, int]) -> str:
    """Lark: free text up to the closing tag, then `@answer`. Without an opening tag the answer may come at once."""
    opening, closing = _spelled(thinking.open, special), _spelled(thinking.close, special)
    if closing.startswith("<["):
        rules = [f"thought: TEXT {closing}", "TEXT: /(?s:.*)/"]
    else:
        rules = [f"thought[suffix={literal(thinking.close)}]: /(?s:.*)/"]
    answer = f"{_spelled(thinking.before_answer, special)} @{ANSWER}"
    thought = "thought BLANK?" if thinking.opened else f"(BLANK? {opening} thought BLANK?)?"
    return "\n".join([f"start: {thought} {answer}", *rules, f"BLANK: {BLANK}"]) + "\n"


def _spelled(text: str, special: Mapping[str, int]) -> str:
    """`text` in a rule of Lark: special tokens by their ids, and strings between them."""
    tags = sorted((tag for tag in special if tag and tag in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else literal(piece) for piece in pieces if piece)
