"""Arguments of a call written as Python, read by `ast` and never run."""

import ast
import json
import re

from motet.text.tools.cursor import Cursor, EndOfText, NotACall

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
_JSON_WORDS = {"true": True, "false": False, "null": None}
_PREFIXED = re.compile(r"[A-Za-z0-9_]$")


def keyword_arguments(cursor: Cursor) -> str:
    """From behind the `(` of a call to its `)`: the keywords as a JSON object.

    Line breaks in a string, and escapes that Python does not know, stand for themselves. A string that is JSON as
    well is read as JSON, whose escapes are Python's but for `\\/` and pairs of surrogates.
    """
    source = _safe_source(_pieces(cursor))
    try:
        call = ast.parse(f"f({source})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise NotACall from exc
    if not isinstance(call, ast.Call) or call.args:
        raise NotACall
    values: dict[str, object] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in values:
            raise NotACall
        values[keyword.arg] = _value(keyword.value)
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError as exc:
        raise NotACall from exc


def _pieces(cursor: Cursor) -> list[str]:
    """Strings, brackets, and what stands between them, up to the bracket that closes the call."""
    pieces: list[str] = []
    depth = ["("]
    while True:
        match = _PIECE.match(cursor.text, cursor.place)
        if match is None:  # a string that does not end
            raise EndOfText
        piece, cursor.place = match[0], match.end()
        if piece in _CLOSING:
            depth.append(piece)
        elif piece in _CLOSING.values():
            if piece != _CLOSING[depth.pop()]:
                raise NotACall
            if not depth:
                return pieces
        pieces.append(piece)


def _safe_source(pieces: list[str]) -> str:
    source = []
    for before, piece in zip(["", *pieces], pieces, strict=False):
        if piece[0] in "\"'":
            if _PREFIXED.search(before):  # f"", b"", r""
                raise NotACall
            source.append(_safe_string(piece))
        else:
            source.append(piece)
    return "".join(source)


def _safe_string(written: str) -> str:
    if written[0] == '"':
        try:
            return repr(json.loads(written))
        except ValueError:
            pass
    triple = written[:3] in ('"""', "'''")
    return _ESCAPE.sub(lambda match: _known_escape(match[0], triple=triple), written)


def _known_escape(text: str, *, triple: bool) -> str:
    if text in "\n\r":
        return text if triple else repr(text)[1:-1]
    return text if text[1] in _KNOWN_ESCAPES else "\\" + text


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() as text):
            return _without_surrogates(text)
        case ast.Constant(value=None | bool() | int() | float() as value):
            return value
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise NotACall


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise NotACall
    return _without_surrogates(node.value)


def _without_surrogates(text: str) -> str:
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as exc:
        raise NotACall from exc
