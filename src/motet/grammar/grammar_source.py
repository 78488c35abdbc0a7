"""Turns a request's `Grammar` into the source that llguidance compiles.

1. A schema is checked and mended; in Lark, tags, schemas and size are checked; the other kinds become Lark.
2. Rules for thoughts that may come before the answer are added.
3. The parts are put together as JSON.

Of the vocabulary only the ids of special tokens are used here. For llguidance a string literal is its bytes, and text
never contains a special token, so a tag that the model writes as one special token is written `<[id]>`.
"""

import json
import re
from collections.abc import Callable, Mapping

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from motet.errors import GrammarError
from motet.grammar.forced import NO_FORCING, forces_much, schema_forces_much
from motet.grammar.json_schema import Multiples, check_schema
from motet.grammar.limits import MAX_LEVELS, MAX_SOURCE_CHARS, MAX_TEXT_CHARS
from motet.grammar.mend import mend
from motet.types import Grammar, GrammarKind, Thinking

WHITESPACE = r" {1,2}|\r?\n[ \t]{0,40}"
"""Allowed once between two parts of JSON: up to two spaces, or a line break and an indentation.

It is limited, since a small model would otherwise write whitespace for ever, and wide enough for the output of
`json.dumps(indent=2)` to a depth of 20.
"""
ANSWER = "answer"
BLANK = r"/[ \t\r\n]{1,4}/"

# A string that does not end is matched too, and refused: if it were skipped, the time for a long line of them would
# grow with the square of its length.
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


def llguidance_source(grammar: Grammar, special: Mapping[str, int]) -> str:
    """Returns the source for llguidance. `special` maps the text of each special token to its id.

    Raises `GrammarError` for a grammar that is wrong, or too much work.
    """
    _check_length(grammar.source, MAX_SOURCE_CHARS)
    if grammar.kind is GrammarKind.JSON:
        answer = _of_schema(read_schema(grammar.source))
    else:
        lark = _lark(grammar, special)
        answer = {"lark_grammar": lark + NO_FORCING if forces_much(lark) else lark}
    if grammar.thinking is None:
        return _together(answer)
    return _together({"lark_grammar": _thinking_first(grammar.thinking, special)}, {"name": ANSWER, **answer})


def schema_source(schema: Mapping[str, object]) -> str:
    """Returns the source for a schema that has been read already."""
    return _together(_of_schema(schema))


def _of_schema(schema: Mapping[str, object]) -> dict[str, object]:
    source = _with_whitespace(schema)
    if schema_forces_much(schema):
        return {"lark_grammar": f"start: %json {source.decode()}{NO_FORCING}"}
    return {"json_schema": msgspec.Raw(source)}


def _together(*grammars: dict[str, object]) -> str:
    """Returns grammars that llguidance compiles together; the first is where it starts."""
    return msgspec.json.encode({"grammars": grammars}).decode()


def read_schema(source: str, multiples: Multiples | None = None) -> Mapping[str, object]:
    """Returns a JSON Schema that is safe for llguidance. Raises `GrammarError` with the path of the wrong part.

    `multiples` has counted the other schemas of the same grammar."""
    _check_length(source, MAX_SOURCE_CHARS)
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise GrammarError(f"it is not JSON, or nested too deeply: {exc}") from exc
    if not isinstance(schema, dict):
        raise GrammarError("it must be an object")
    schemas, targets = check_schema(schema, multiples)
    for inner in schemas:
        mend(inner, targets)
    return {key: value for key, value in schema.items() if key != "$schema"}


def prepared_lark(lark: str, special: Mapping[str, int], *, mend_json: Callable[[str], str]) -> str:
    """Returns Lark that is safe for llguidance. Raises `GrammarError` if it is too much work.

    Each string literal that is exactly the text of a special token becomes `<[id]>`. Strings in comments, in regular
    expressions, and in the JSON after `%regex` and `%llguidance` stay as they are, and so do strings with a tag and
    more text, or with the suffix `i`. llguidance allows `<[id]>` in rules only, so a format writes its tags in rules
    (lower case), not in terminals. `mend_json` checks and mends the JSON after `%json`.
    """
    out, plain, at = [], [], 0
    while (found := _PIECES.search(lark, at)) is not None:
        start, end = found.span()
        if found.lastgroup in ("json", "options"):
            start, end = end, _end_of_json(lark, end)
        plain.append(lark[at:start])
        piece = lark[start:end]
        out += [plain[-1], mend_json(piece) if found.lastgroup == "json" else _prepared(piece, found, special=special)]
        at = end
    plain.append(lark[at:])
    code = "".join(plain)  # without strings, comments and the like
    levels = len(_RULE.findall(code)) + code.count("(")  # a rule is one level, and one more for each group in it
    if levels > MAX_LEVELS:
        raise GrammarError(f"it has {levels} rules and groups, and {MAX_LEVELS} are allowed")
    return "".join([*out, plain[-1]])


def _check_length(text: str, most: int = MAX_TEXT_CHARS) -> None:
    if len(text) > most:
        raise GrammarError(f"it has {len(text)} characters, and {most} are allowed")


def _with_whitespace(schema: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema})


def _lark(grammar: Grammar, special: Mapping[str, int]) -> str:
    """Returns a regular expression, a list of choices, Lark or GBNF as Lark."""
    match grammar.kind:
        case GrammarKind.REGEX:
            _check_length(grammar.source)
            return f"start: /{regex_to_lark(grammar.source, use_ascii='')}/"
        case GrammarKind.CHOICE:
            choices = msgspec.json.decode(grammar.source, type=list[str])
            for choice in choices:
                _check_length(choice)
            # All choices are in one terminal: as alternatives of a rule, each would be an item of the parser.
            return f"start: CHOICE\nCHOICE: {' | '.join(map(_literal, choices))}"
        case _:
            multiples = Multiples()
            return prepared_lark(
                _as_lark(grammar.source),
                special,
                mend_json=lambda schema: _with_whitespace(read_schema(schema, multiples)).decode(),
            )


def _as_lark(source: str) -> str:
    """Returns Lark unchanged, and turns llama.cpp's GBNF, and EBNF that looks like it, into Lark."""
    num_rules = source.count("::=")
    if num_rules > MAX_LEVELS:  # the time to convert grows with their square
        raise GrammarError(f"it has {num_rules} rules, and {MAX_LEVELS} are allowed")
    try:
        return any_to_lark(source)
    except Exception as exc:  # the library's own class derives from Exception, and its bugs raise any other
        raise GrammarError(f"it is neither Lark nor GBNF: {exc}") from exc


def _thinking_first(thinking: Thinking, special: Mapping[str, int]) -> str:
    """Returns Lark for free text up to the closing tag, then `@answer`. The answer may also come at once if no thought
    has been opened."""
    opening, closing = _spelled(thinking.open, special), _spelled(thinking.close, special)
    if closing.startswith("<["):
        rules = [f"thought: TEXT {closing}", "TEXT: /(?s:.*)/"]
    else:
        rules = [f"thought[suffix={_literal(thinking.close)}]: /(?s:.*)/"]
    answer = f"{_spelled(thinking.before_answer, special)} @{ANSWER}"
    thought = "thought BLANK?" if thinking.opened else f"(BLANK? {opening} thought BLANK?)?"
    return "\n".join([f"start: {thought} {answer}", *rules, f"BLANK: {BLANK}"]) + "\n"


def _spelled(text: str, special: Mapping[str, int]) -> str:
    """Returns `text` for a rule of Lark: special tokens by their ids, and strings between them."""
    tags = sorted((tag for tag in special if tag and tag in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else _literal(piece) for piece in pieces if piece)


def _literal(text: str) -> str:
    """Returns a string of Lark, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _prepared(piece: str, found: re.Match[str], *, special: Mapping[str, int]) -> str:
    """Checks a string or a regular expression of Lark, and turns a string that is a special token into that token."""
    if found["string"] is None and found["regex"] is None:
        return piece
    if found["string_end"] is None and found["regex_end"] is None:
        raise GrammarError(f"the string or regular expression at character {found.start()} does not end on its line")
    if len(piece) > MAX_TEXT_CHARS:
        raise GrammarError(f"a string has {len(piece)} characters, and {MAX_TEXT_CHARS} are allowed")
    if found["string"] is None:
        return piece
    try:
        token = special.get(json.loads(piece))
    except json.JSONDecodeError:
        return piece
    return piece if token is None else f"<[{token}]>"


def _end_of_json(lark: str, start: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(lark, start)[1]
    except (json.JSONDecodeError, RecursionError) as exc:
        raise GrammarError(f"the JSON at character {start} cannot be read: {exc}") from exc
