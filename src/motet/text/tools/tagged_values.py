"""Grammars of arguments that are plain text between tags: strings as they are, all other values as JSON.

The parser reads a text as JSON if the schema allows a value of its type, and as a string otherwise. The grammar
therefore excludes strings that would be read as a value that the schema does not allow. It cannot distinguish a string
from JSON that starts in the same way, and so also excludes strings that start like constrained JSON.

A string and the tag that ends it are one terminal, because the lexer would add the start of the tag to the string.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from motet.text.tools.argument_schema import ANNOTATIONS, OF_STRINGS, SHARED, Argument, StringForm, refused
from motet.text.tools.grammar import NEWLINE, json_rule, tag
from motet.text.tools.patterns import literal, without
from motet.text.tools.typed import Schema, quoted, types_of

MAX_REGEX_CHARS: Final = 4_000
"""Maximum number of characters of a regular expression that is not in a rule of its own."""
NOT: Final = "~"
"""Start of an expression that a text must not match. The characters of texts are escaped, so they cannot start it."""
SPACES: Final = r"\s\x{1c}-\x{1f}"
"""White space that the parser drops around JSON."""
NUMBER: Final = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
INTEGER: Final = r"-?(?:0|[1-9][0-9]*)"
ANY_INTEGER: Final = rf"{INTEGER}(?:\.0+|(?:\.[0-9]+)?[eE][+-]?[0-9]+)?"
"""Numbers that the parser can read as integers, such as `1.0`."""
PLAIN: Final = {"null": "null", "boolean": "true|false", "integer": INTEGER, "number": NUMBER}
"""JSON of scalars without constraints."""
READ_AS: Final = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": ANY_INTEGER,
    "number": NUMBER,
}
"""Texts that the parser reads as scalars."""
STARTS: Final = {
    "null": "nN",
    "boolean": "tTfF",
    "integer": "0-9-",
    "number": "0-9-",
    "array": r"\[(",
    "object": r"{",
}
"""First characters of texts that the parser can read as values of a type."""


@dataclass(frozen=True)
class ValueEnd:
    """The end of an argument."""

    tag: str
    special: Mapping[str, int]
    """Ids of the model's special tokens by their texts."""
    on_own_lines: bool
    """True if the tag is on its own line."""

    @property
    def rule(self) -> str:
        line = [quoted(NEWLINE)] if self.on_own_lines else []
        return " ".join([*line, tag(self.tag, self.special)])

    @property
    def text(self) -> str:
        """The end, as far as it is text and not a special token."""
        return (NEWLINE if self.on_own_lines else "") + ("" if self.tag in self.special else self.tag)

    @property
    def token(self) -> str:
        return f" {tag(self.tag, self.special)}" if self.tag in self.special else ""


def free_text(end: str, special: Mapping[str, int]) -> str:
    """Returns the rule `text` for any string up to the tag `end`."""
    if end in special:
        return f"text: /{without(end)}/ {tag(end, special)}"
    return rf"text[lazy]: /(.|\n)*/ {quoted(end)}"


def value_rules(argument: Argument, rule: str, *, end: ValueEnd) -> tuple[list[str], str]:
    """Returns the rules for the value of an argument, and an expression that matches the value with its end. The names
    of the rules start with `rule`. Raises `GrammarError` for constraints that cannot be enforced."""
    if not argument.types:
        raise refused(argument.path, "no value is valid")
    if "string" not in argument.types:
        return [f"{rule}_value: {json_rule(argument.schema)}"], f"{rule}_value {end.rule}"
    forms, others = argument.strings(end=end.tag), argument.other_values()
    if any(form.is_free for form in forms) and all(_is_plain(other) for other in others):
        return [], "text"
    as_json = [other for other in others if _scalars(other) is None]
    limits = _limits(as_json, others, argument=argument)
    texts = [each for form in forms for each in _expressions(form, limits=limits, end=end.tag)]
    if scalars := [scalar for other in others for scalar in _scalars(other) or ()]:
        texts.append([f"(?:{'|'.join(scalars)})"])
    lines, values = list[str](), list[str]()
    if texts:
        lines, value = _text_rule(texts, f"{rule}_text".upper(), end=end)
        values.append(value)
    if as_json:
        shared = {key: argument.schema[key] for key in SHARED if key in argument.schema}
        schema = as_json[0] if len(as_json) == 1 else {"anyOf": as_json}
        lines.append(f"{rule}_value: {json_rule({**shared, **schema})}")
        values.append(f"{rule}_value {end.rule}")
    if not values:
        raise refused(argument.path, "no value is valid")
    return lines, values[0] if len(values) == 1 else f"({' | '.join(values)})"


def _text_rule(texts: Sequence[Sequence[str]], name: str, *, end: ValueEnd) -> tuple[list[str], str]:
    """Returns the rules for any of `texts`, and an expression that matches a text with its end. A text must match all
    expressions of one of `texts`. Without an intersection, it has no rule, since rules are limited."""
    if all(len(each) == 1 for each in texts) and sum(len(each[0]) for each in texts) <= MAX_REGEX_CHARS:
        return [], f"/(?:{'|'.join(each[0] for each in texts)}){literal(end.text)}/{end.token}"
    alternatives = " | ".join(" & ".join(_piece(regex) for regex in each) for each in texts)
    return [f"{name}: ({alternatives}) {quoted(end.text) if end.text else ''}".rstrip()], f"{name}{end.token}"


def _piece(regex: str) -> str:
    return f"~/{regex[1:]}/" if regex.startswith(NOT) else f"/{regex}/"


def _expressions(form: StringForm, *, limits: Sequence[str], end: str) -> Iterator[list[str]]:
    """Yields alternatives for the strings of a form, without their end. A string must match all expressions of one
    alternative; it must not match an expression that starts with `NOT`."""
    regexes = [regex.source for regex in form.regexes]
    if form.texts is not None:
        for listed in _joined_literals(form.texts):
            yield [f"(?:{listed})", *regexes]
        return
    if form.minimum or form.maximum is not None:
        regexes.append(f"(?s:.){{{form.minimum},{'' if form.maximum is None else form.maximum}}}")
    if all(regex.may_have_tags for regex in form.regexes):
        regexes.append(without(end))
    yield [*regexes, *limits]


def _joined_literals(texts: Sequence[str]) -> Iterator[str]:
    """Yields expressions for the texts, with at most `MAX_REGEX_CHARS` characters each if no text is longer."""
    joined = ""
    for text in map(literal, texts):
        if joined and len(joined) + len(text) >= MAX_REGEX_CHARS:
            yield joined
            joined = text
        else:
            joined = f"{joined}|{text}" if joined else text
    yield joined


def _is_plain(schema: Schema) -> bool:
    """Returns True if a schema constrains nothing but the type."""
    return schema.keys() - {*ANNOTATIONS, *OF_STRINGS} == {"type"}


def _scalars(schema: Schema) -> list[str] | None:
    """Returns regular expressions for the JSON of all values, if they are scalars that a regular expression can match.
    Returns None for other schemas."""
    kinds = schema.get("type")
    if _is_plain(schema) and isinstance(kinds, str):
        return [PLAIN[kinds]] if kinds in PLAIN else None
    if not schema.keys() - ANNOTATIONS <= {"type", "enum", "const"} or not {"enum", "const"} & schema.keys():
        return None
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list) or ("enum" in schema and "const" in schema):
        return None
    fitting = [value for value in values if "type" not in schema or types_of({"const": value}, {}) & set(_names(kinds))]
    if any(isinstance(value, list | dict) for value in fitting):
        return None
    return [literal(json.dumps(value)) for value in fitting]


def _names(kinds: object) -> list[str]:
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    return [name for name in names if isinstance(name, str)]


def _starting_otherwise(schemas: Sequence[Schema], argument: Argument) -> str | None:
    """Returns an expression for texts that do not start like the JSON of `schemas`; None for any text. It is not a
    negation: llguidance would have to try all lengths of a text to find that no text satisfies it."""
    kinds = {kind for schema in schemas for kind in types_of(schema, argument.schema)} & STARTS.keys()
    if not kinds:
        return None
    chars = "".join(sorted({STARTS[kind] for kind in kinds}, reverse=True))
    minus = "|-(?:[^0-9](?s:.*))?" if kinds & {"integer", "number"} else ""
    return f"[{SPACES}]*(?:[^{SPACES}{chars}](?s:.*){minus})?"


def _limits(as_json: Sequence[Schema], others: Sequence[Schema], *, argument: Argument) -> list[str]:
    """Returns expressions for the texts that the parser does not read as constrained values of another type.
    `as_json`: schemas of values that have rules of their own. `others`: all schemas of values that are not strings."""
    plain = {str(schema["type"]) for schema in others if _is_plain(schema)}
    if "number" in plain:
        plain.add("integer")
    types = {kind for schema in others if not _is_plain(schema) for kind in types_of(schema, argument.schema)}
    words = [f"(?:{READ_AS[kind]})" for kind in sorted(types - plain) if kind in READ_AS]
    start = _starting_otherwise(as_json, argument)
    space = f"[{SPACES}]*"
    return [*([start] if start else []), *([f"{NOT}{space}(?:{'|'.join(words)}){space}"] if words else [])]
