"""Formats with calls in Python syntax, which `ast` parses and which never run. A call is sent when it is complete.

pythonic: Llama 4 and Llama 3.2's small models, Gorilla, ToolACE
    [get_weather(city="Paris", unit="celsius"), get_time()]

olmo3
    <function_calls>get_weather(city="Paris", unit="celsius")
    get_time()</function_calls>
"""

import ast
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from motet.text.tools.cursor import Cursor, EndOfText, NotACall
from motet.text.tools.grammar import NEWLINE, bare, call_rules, document, keyword_arguments, repeated, tag, tagged
from motet.text.tools.tool_format import ParsedCall, Tool, ToolFormat, ToolRules, region_parser, tool_until
from motet.text.tools.typed import quoted

OPENING, CLOSING = "<|python_start|>", "<|python_end|>"
LINES, LINES_CLOSING = "<function_calls>", "</function_calls>"


def _listed_calls(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[ParsedCall | None]:
    cursor.skip_space()
    cursor.expect("[")
    while True:
        yield _call(cursor, tools)
        if cursor.accept("]"):
            break
        cursor.expect(",")
    yield None
    cursor.skip_space()
    if not cursor.at_end():
        raise NotACall


def _calls_on_lines(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[ParsedCall | None]:
    while True:
        yield _call(cursor, tools)


def _call(cursor: Cursor, tools: Sequence[Tool]) -> ParsedCall:
    """Returns the next call, and advances past white space before and after it."""
    cursor.skip_space()
    name = tool_until(cursor, tools, "(").name
    cursor.expect("(")
    call = ParsedCall(name, _keywords_as_json(cursor), complete=True)
    cursor.skip_space()
    return call


def _listed_grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    start = bare(rules, special, first="[", opening=OPENING)
    return document(start, [f'calls: "[" {repeated(rules, "call", between=quoted(", "))} "]"'], _call_rules(rules))


def _lines_grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    region = f"{repeated(rules, 'call', between=quoted(NEWLINE))} {tag(LINES_CLOSING, special)}"
    return document(tagged(rules, special, opening=LINES, region=region, closed=True), _call_rules(rules))


def _call_rules(rules: ToolRules) -> list[str]:
    return call_rules(
        rules.callable, lambda name, keywords: f'{quoted(name + "(")} {keywords} ")"', arguments=keyword_arguments
    )


PYTHONIC = ToolFormat(
    name="pythonic",
    opening_tags=(OPENING,),
    bare="[",
    closing_tags=(CLOSING,),
    parse=region_parser(_listed_calls),
    grammar=_listed_grammar,
    template_marks=("[func_name1(",),
)
OLMO3 = ToolFormat(
    name="olmo3",
    opening_tags=(LINES,),
    closing_tags=(LINES_CLOSING,),
    parse=region_parser(_calls_on_lines),
    grammar=_lines_grammar,
    template_marks=(LINES,),
)


_PIECE = re.compile(
    r'"""(?:\\.|[^\\])*?"""'
    r"|'''(?:\\.|[^\\])*?'''"
    r'|"(?!"")(?:\\.|[^"\\])*"'
    r"|'(?!'')(?:\\.|[^'\\])*'"
    r"|[()\[\]{}]|[^\"'()\[\]{}]+",
    re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ESCAPE = re.compile(r"\\.|\n|\r", re.DOTALL)
_KNOWN_ESCAPES = frozenset("\n\\'\"abfnrtv0123xuUN")
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
_JSON_WORD = re.compile(r"\b(?:true|false|null)\b(?!\s*=)")
_FRACTION = re.compile(r"\b\d+(?:\.\d+)?[eE]\+?\d{3,}|\b\d{300,}\.\d+")
"""A number that can be larger than any double."""
_PREFIXED = re.compile(r"[A-Za-z0-9_]$")


def _keywords_as_json(cursor: Cursor) -> str:
    """Advances from the position after the `(` of a call past its `)`, and returns the keywords as a JSON object. Line
    breaks in a string, and escapes that Python does not have, remain unchanged. A string that is also valid JSON is
    decoded as JSON, whose escapes differ from Python's only in `\\/` and pairs of surrogates."""
    source = _source(cursor)
    try:
        call = ast.parse(f"f({source})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NotACall
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in values or len(values) < len(call.keywords):
            raise NotACall
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return arguments.encode("utf-16", "surrogatepass").decode("utf-16")  # pairs of surrogates become a character
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as exc:
        raise NotACall from exc


def _source(cursor: Cursor) -> str:
    """Returns the text up to the bracket that closes the call, changed so that it is valid Python."""
    source = [""]
    depth = ["("]
    while True:
        if (match := _PIECE.match(cursor.text, cursor.position)) is None:  # the end, or a string that does not end
            raise EndOfText if cursor.at_end() or not _PREFIXED.search(source[-1]) else NotACall
        piece, cursor.position = match[0], match.end()
        if piece in _CLOSING:
            depth.append(piece)
        elif piece in _CLOSING.values():
            if piece != _CLOSING[depth.pop()]:
                raise NotACall
            if not depth:
                return "".join(source)
        elif piece[0] not in "\"'":
            piece = _JSON_WORD.sub(lambda word: _JSON_WORDS[word[0]], _FRACTION.sub(_finite, piece))
        elif _PREFIXED.search(source[-1]):  # f"", b"", r"", null""
            raise NotACall
        else:
            piece = _safe_string(piece)
        source.append(piece)


def _finite(number: re.Match[str]) -> str:
    """Returns a number, or the largest double in place of infinity, which JSON does not have."""
    return repr(sys.float_info.max) if math.isinf(float(number[0])) else number[0]


def _safe_string(literal: str) -> str:
    """Returns a Python string literal without escapes that Python does not have."""
    if literal[0] == '"':
        try:
            return repr(json.loads(literal))
        except ValueError:
            pass
    triple = literal[:3] in ('"""', "'''")
    return _ESCAPE.sub(lambda match: _known_escape(match[0], triple=triple), literal)


def _known_escape(text: str, *, triple: bool) -> str:
    if text in "\n\r":
        return text if triple else repr(text)[1:-1]
    return text if text[1] in _KNOWN_ESCAPES else "\\" + text
