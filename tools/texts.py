"""Finds the texts in a file: docstrings, comments, help texts and messages of Python; paragraphs of Markdown; comments
of C++.

Python is split by one regular expression, which is several times as fast as `ast` and also finds comments. A string
that starts a line outside brackets is the docstring of a module, class, function or attribute. A string inside the
brackets of a call is a help text if `DECLARES` matches the name of the call, and a message if `SAYS` matches it.

Code inside a text is left out: inline code between backticks, fields of f-strings, doctests and URLs.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path


class Kind(StrEnum):
    """Kinds of texts."""

    DOCSTRING = "docstring"
    COMMENT = "comment"
    HELP = "help text"
    MESSAGE = "message"
    PARAGRAPH = "paragraph"


@dataclass(frozen=True)
class Text:
    """One text, of one or several lines."""

    kind: Kind
    line: int
    """Number of the text's first line in the file."""
    words: str
    """The text without the code in it. It has the line breaks of the file."""


DECLARES = re.compile(
    r"(?:^|\.)(?:setting|limit|(?:counter|gauge|histogram)(?:_field)?|Counter|Gauge|Histogram|Option|Argument|Typer|Field"
    r"|add_argument|add_parser|ArgumentParser)$"
)
"""Calls whose strings are help texts: of settings, metrics, options of typer and argparse, fields of pydantic."""
HELP_ARGUMENT = re.compile(r"\b(?:help|description|epilog|summary)\s*=\s*\(?\s*$")
"""The end of the code before a string that is a help text in any call."""
SAYS = re.compile(
    r"^raise\s|(?:Error|Exception|Warning|Misfit|Refused|Rule)$"
    r"|(?:^|[._])(?:log|logger|logging)\.(?:debug|info|warning|error|exception|critical|log)$"
    r"|(?:^|\.)(?:echo|warn|invalid_value|invalid_type|unsupported_parameter|wrong)$"
)
"""Calls whose strings are messages: exceptions, functions that make exceptions, and loggers."""
TWO_WORDS = re.compile(r"\w[,.:;]? \(?\w")
"""Matches help texts and messages, which have at least two words. Other strings in these calls are names."""
DIRECTIVE = re.compile(r"#\s*(?:!|type:|noqa|fmt:|pragma|ruff:|mypy:|pylint:|-\*-|Copyright|SPDX)", re.IGNORECASE)
"""Comments for tools, which are not texts."""

PYTHON = re.compile(
    r"""
    (?P<string>(?P<prefix>[rRbBuUfF]{0,2})
        (?:\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    | (?P<comment>\#[^\n]*)
    | (?P<open>(?:raise\s+)?[\w.]*+[(\[{])
    | (?P<close>[)\]}])
    | [\w.]+
    """,
    re.VERBOSE | re.DOTALL,
)
C_COMMENT = re.compile(r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""", re.DOTALL)
FIELD = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
CODE = re.compile(
    r"``[^`]+``|`[^`\n]*(?:\n[^`\n]*)?`|^[ \t]*(?:>>>|\.\.\.) .*$|https?://[^\s)]+|\]\([^)\s]*\)", re.MULTILINE
)
FENCE = re.compile(r"\s*(?:```|~~~)")
NEW_BLOCK = re.compile(r"\s*(?:[-*+]|\d+\.|#+|\|)(?:\s|$)")


@dataclass(frozen=True)
class Piece:
    """One string or comment token, before tokens that belong together are joined."""

    kind: Kind
    start: int
    stop: int
    words: str
    alone: bool
    """True if only white space is before it on its line."""


def texts_of(path: Path) -> list[Text]:
    """Returns the texts of a file. The list is empty if `FINDERS` does not have the file's suffix."""
    find = FINDERS.get(path.suffix)
    return list(find(path.read_text(errors="replace"))) if find else []


def python_texts(source: str) -> Iterator[Text]:
    """Yields docstrings, comments, help texts and messages."""
    return _joined(_python_pieces(source), source)


def c_texts(source: str) -> Iterator[Text]:
    """Yields the comments of C or C++."""
    return _joined(_c_pieces(source), source)


def markdown_texts(source: str) -> Iterator[Text]:
    """Yields paragraphs, headings, list items and table rows, without blocks of code."""
    block: list[str] = []
    fenced = False
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        if is_fence := FENCE.match(line) is not None:
            fenced = not fenced
        is_text = not fenced and not is_fence and bool(line.strip())
        if block and (not is_text or NEW_BLOCK.match(line)):
            yield Text(Kind.PARAGRAPH, number - len(block), without_code("\n".join(block)))
            block = []
        if is_text:
            block.append(line)


FINDERS: dict[str, Callable[[str], Iterator[Text]]] = {
    ".py": python_texts,
    ".md": markdown_texts,
    **dict.fromkeys((".h", ".cpp", ".cu"), c_texts),
}


def without_code(words: str) -> str:
    """Returns a text in which each piece of code is replaced by a mark that no pattern matches. Line breaks stay."""
    return CODE.sub(_mark, words)


def _mark(code: re.Match[str]) -> str:
    return "``" + "\n" * code[0].count("\n")


def _python_pieces(source: str) -> Iterator[Piece]:
    calls: list[str] = []  # for each open bracket the name before it
    for token in PYTHON.finditer(source):
        if token["open"]:
            name = token["open"][:-1]
            calls.append(calls[-1] if calls and token["open"] == "(" else name)
        elif token["close"]:
            calls[-1:] = []
        elif token["comment"] and not DIRECTIVE.match(token[0]):
            yield Piece(Kind.COMMENT, token.start(), token.end(), token[0][1:], _is_alone(source, token.start()))
        elif token["string"] and "b" not in token["prefix"].lower():
            alone = _is_alone(source, token.start())
            kind = (
                _kind_in(calls[-1], source[max(0, token.start() - 40) : token.start()])
                if calls
                else Kind.DOCSTRING
                if alone
                else None
            )
            if kind:
                yield Piece(kind, token.start(), token.end(), _words_of(token), alone)


def _kind_in(call: str, before: str) -> Kind | None:
    """Returns the kind of a string inside the brackets of a call, or None if it is not a text."""
    if DECLARES.search(call) or HELP_ARGUMENT.search(before):
        return Kind.HELP
    return Kind.MESSAGE if SAYS.search(call) else None


def _words_of(string: re.Match[str]) -> str:
    """Returns the text between the quotes, without the fields of an f-string."""
    words = string[0][len(string["prefix"]) :]
    quote = 3 if words.startswith(('"""', "'''")) else 1
    words = words[quote:-quote]
    if "f" in string["prefix"].lower():
        words = FIELD.sub(_mark, words)
    return words.replace("\\n", "  ")


def _c_pieces(source: str) -> Iterator[Piece]:
    for token in C_COMMENT.finditer(source):
        if token["comment"]:
            words = token[0].removeprefix("/*").removesuffix("*/").replace("//", "  ")
            yield Piece(Kind.COMMENT, token.start(), token.end(), words, _is_alone(source, token.start()))


def _is_alone(source: str, start: int) -> bool:
    return not source[source.rfind("\n", 0, start) + 1 : start].strip()


def _joined(pieces: Iterator[Piece], source: str) -> Iterator[Text]:
    """Yields texts. Strings that Python joins are one text, and so are comments on consecutive lines."""
    run: list[Piece] = []
    for piece in pieces:
        if run and not _belongs(piece, run[-1], between=source[run[-1].stop : piece.start]):
            yield from _text(run, source)
            run = []
        run.append(piece)
    if run:
        yield from _text(run, source)


def _belongs(piece: Piece, last: Piece, *, between: str) -> bool:
    """Returns True if a piece continues the text of the piece before it."""
    if piece.kind is not last.kind or piece.kind is Kind.DOCSTRING or between.strip():
        return False
    return piece.kind is not Kind.COMMENT or (last.alone and between.count("\n") == 1)


def _text(run: list[Piece], source: str) -> Iterator[Text]:
    """Yields the text of joined pieces, unless it is a single word, such as a name."""
    words = run[0].words
    for last, piece in pairwise(run):
        words += source[last.stop : piece.start] + piece.words
    if run[0].kind is Kind.DOCSTRING or TWO_WORDS.search(words):
        yield Text(run[0].kind, source.count("\n", 0, run[0].start) + 1, without_code(words))
