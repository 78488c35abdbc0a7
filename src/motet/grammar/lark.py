"""Lark as llguidance may see it: tags that are tokens of their own, JSON that is bounded, rules that fit its stack.

llguidance takes a string literal for its bytes, and never allows a special token as text. So a tag that the model
writes as one special token has to be written `<[id]>`.
"""

import json
import re
from collections.abc import Callable, Mapping

from motet.errors import GrammarError
from motet.grammar.limits import MAX_LEVELS, MAX_TEXT_CHARS

PreparedSchema = Callable[[str], str]
"""A schema in JSON -> the same with everything in it that llguidance needs to be told. Raises `GrammarError`."""

# A string that does not end is matched too, and refused: were it passed over, a long line of them would take the square
# of its length.
_PIECES = re.compile(
    r"""
      (?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*+(?P<string_end>"i?)?)
    | (?P<regex>/(?:[^/\\\n]|\\.)*+(?P<regex_end>/[imslux]*)?)
    | (?P<json>%json\s*(?=\{))
    | (?P<options>%(?:regex|llguidance)\s*(?=\{))
    """,
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*[!?]?[\w-]+(?:\.-?\d+)?(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:", re.MULTILINE)
_DECODER = json.JSONDecoder()


def literal(text: str) -> str:
    """As a string of Lark; the escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def prepared_lark(lark: str, special: Mapping[str, int], prepared_schema: PreparedSchema) -> str:
    """Lark with its tags, its schemas and its size seen to. Raises `GrammarError` for one that is too much.

    Each string literal that is exactly the text of a special token becomes `<[id]>`. Left alone are strings in
    comments, in regular expressions, in the JSON behind `%regex` and `%llguidance`, those with a tag and more text in
    them, and those with the suffix `i`. llguidance allows `<[id]>` in rules only, so a format writes its tags in rules
    (lower case), not in terminals.
    """
    out, plain, at = [], [], 0
    while (found := _PIECES.search(lark, at)) is not None:
        start, end = found.span()
        if found.lastgroup in ("json", "options"):
            start, end = end, _end_of_json(lark, end)
        plain.append(lark[at:start])
        out += [plain[-1], _prepared_piece(lark[start:end], found, special, prepared_schema)]
        at = end
    plain.append(lark[at:])
    _check_levels("".join(plain))
    return "".join([*out, plain[-1]])


def _prepared_piece(
    piece: str, found: re.Match[str], special: Mapping[str, int], prepared_schema: PreparedSchema
) -> str:
    if found.lastgroup == "json":
        return prepared_schema(piece)
    if found["string"] is None and found["regex"] is None:
        return piece
    if found["string_end"] is None and found["regex_end"] is None:
        raise GrammarError(f"the string or regular expression at character {found.start()} does not end on its line")
    if len(piece) > MAX_TEXT_CHARS:
        raise GrammarError(f"a string has {len(piece)} characters, and {MAX_TEXT_CHARS} are allowed")
    return piece if found["string"] is None else _as_token(piece, special)


def _as_token(string: str, special: Mapping[str, int]) -> str:
    try:
        token = special.get(json.loads(string))
    except json.JSONDecodeError:
        return string
    return string if token is None else f"<[{token}]>"


def _end_of_json(lark: str, start: int) -> int:
    """Where the JSON value ends that begins at `start`."""
    try:
        return _DECODER.raw_decode(lark, start)[1]
    except (json.JSONDecodeError, RecursionError) as exc:
        raise GrammarError(f"the JSON at character {start} cannot be read: {exc}") from exc


def _check_levels(plain: str) -> None:
    """`plain`: without strings, comments and the like. A rule counts one level, and one more for each group in it."""
    levels = len(_RULE.findall(plain)) + plain.count("(")
    if levels > MAX_LEVELS:
        raise GrammarError(f"it has {levels} rules and groups, and {MAX_LEVELS} are allowed")
