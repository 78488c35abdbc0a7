"""Turns a request's `Grammar` into the source that llguidance compiles.

1. A schema is checked and rewritten. The other kinds of grammar become Lark, in which tags become tokens, schemas are
   checked and rewritten, and the size is limited.
2. Rules for reasoning that can precede the answer are added.
3. The grammars are combined in one JSON object.

Only the ids of special tokens are used of the vocabulary. For llguidance a string literal stands for its bytes, and
text never contains a special token. A tag that the model generates as one special token is therefore written `<[id]>`.
"""

import json
import re
from collections.abc import Callable, Mapping

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from motet.errors import GrammarError
from motet.grammar.forced import NO_FORCING, forces_much, schema_forces_much
from motet.grammar.limits import MAX_LEVELS, MAX_TEXT_CHARS, check_length, check_source
from motet.grammar.schema.client_schema import has_open_object, read_schema
from motet.grammar.schema.multiples import Multiples
from motet.types import ANY_ANSWER, Grammar, GrammarKind, Thinking

WHITESPACE = r" {1,2}|\r?\n[ \t]{0,40}"
"""White space that is allowed once between two tokens of JSON: up to two spaces, or a line break and an indentation.
The output of `json.dumps(indent=2)` is allowed up to a depth of 20. Without a limit, a small model would generate white
space until `max_tokens`."""
ANSWER = "answer"
BLANK = r"/[ \t\r\n]{1,4}/"

# A string without an end is matched too, and then refused. If it were skipped, the time for a long line of such strings
# would grow with the square of the length.
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
    """Returns the source for llguidance. `special` maps the text of each special token to its id. Raises `GrammarError`
    for a grammar that is invalid or exceeds a limit."""
    check_source(grammar)
    if grammar.kind is GrammarKind.JSON:
        answer = _schema_grammar(read_schema(grammar.source))
    elif grammar.source == ANY_ANSWER and grammar.thinking is not None and grammar.thinking.budget is not None:
        # An opening tag in the answer would start reasoning without a budget.
        answer = {"lark_grammar": f"start: <[^{grammar.thinking.budget.open_id}]>*"}
    else:
        lark = _lark(grammar, special)
        answer = {"lark_grammar": lark + NO_FORCING if forces_much(lark) else lark}
    if grammar.thinking is None:
        return _combined(answer)
    return _combined({"lark_grammar": _reasoning_rules(grammar.thinking, special)}, {"name": ANSWER, **answer})


def schema_source(schema: Mapping[str, object]) -> str:
    """Returns the source for a schema that `read_schema` has returned, or for a part of such a schema."""
    return _combined(_schema_grammar(schema))


def _schema_grammar(schema: Mapping[str, object]) -> dict[str, object]:
    source = _with_whitespace(schema)
    if schema_forces_much(schema):
        return {"lark_grammar": f"start: %json {source}{NO_FORCING}"}
    return {"json_schema": msgspec.Raw(source)}


def _combined(*grammars: dict[str, object]) -> str:
    """Returns the source for grammars that refer to each other. An answer starts in the first grammar."""
    return msgspec.json.encode({"grammars": grammars}).decode()


def prepared_lark(lark: str, special: Mapping[str, int], *, rewrite_json: Callable[[str], str]) -> str:
    """Returns Lark that is safe for llguidance. Raises `GrammarError` if it exceeds a limit.

    Each string literal that is exactly the text of a special token becomes `<[id]>`. Strings in comments, in regular
    expressions, and in the JSON after `%regex` and `%llguidance` are unchanged, and so are strings with a tag and
    other text, or with the suffix `i`. llguidance allows `<[id]>` only in rules. A format of tool calls therefore has
    its tags in rules (lower case), not in terminals. `rewrite_json` checks and rewrites the JSON after `%json`."""
    out, plain, at = [], [], 0
    while (found := _PIECES.search(lark, at)) is not None:
        start, end = found.span()
        if found.lastgroup in ("json", "options"):
            start, end = end, _end_of_json(lark, end)
        plain.append(lark[at:start])
        piece = lark[start:end]
        out.append(plain[-1])
        out.append(rewrite_json(piece) if found.lastgroup == "json" else _prepared(piece, found, special=special))
        at = end
    plain.append(lark[at:])
    code = "".join(plain)  # without strings, regular expressions, comments and JSON
    if (levels := len(_RULE.findall(code)) + code.count("(")) > MAX_LEVELS:  # "(" opens a group of a rule
        raise GrammarError(f"it has {levels} rules and groups; at most {MAX_LEVELS} are allowed")
    return "".join([*out, plain[-1]])


def _with_whitespace(schema: Mapping[str, object]) -> str:
    """Returns a schema in JSON with the options for llguidance. They are the last key: llguidance moves the last key to
    their place, and the order of the keywords decides the order of the properties."""
    given = schema.get("x-guidance", {"whitespace_pattern": WHITESPACE})
    escapes = {"json_allowed_escapes": 'nrbtf\\"'} if has_open_object(schema) else {}
    options = {"x-guidance": {**given, **escapes}} if isinstance(given, dict) else {}
    without = {key: value for key, value in schema.items() if key != "x-guidance"}
    return json.dumps({**without, **options}, ensure_ascii=False, separators=(",", ":"))


def _lark(grammar: Grammar, special: Mapping[str, int]) -> str:
    """Returns a regular expression, a list of choices, Lark or GBNF as Lark."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return f"start: /{regex_to_lark(grammar.source, use_ascii='')}/"
        case GrammarKind.CHOICE:
            choices = msgspec.json.decode(grammar.source, type=list[str])
            for choice in choices:
                check_length(choice)
            # All choices are in one terminal: as alternatives of a rule, each would be a parser item.
            return f"start: CHOICE\nCHOICE: {' | '.join(map(_literal, choices))}"
        case _:
            lark, multiples = _as_lark(grammar.source), Multiples()
            return prepared_lark(
                lark, special, rewrite_json=lambda schema: _with_whitespace(read_schema(schema, multiples))
            )


def _as_lark(source: str) -> str:
    """Returns Lark unchanged. Converts llama.cpp's GBNF, and similar EBNF, to Lark. This takes a time that grows with
    the square of the number of rules."""
    if (num_rules := source.count("::=")) > MAX_LEVELS:
        raise GrammarError(f"it has {num_rules} rules; at most {MAX_LEVELS} are allowed")
    try:
        return any_to_lark(source)
    except Exception as exc:  # the library's error class derives from Exception, and its bugs raise other errors
        raise GrammarError(f"it is neither Lark nor GBNF: {exc}") from exc


def _reasoning_rules(thinking: Thinking, special: Mapping[str, int]) -> str:
    """Returns Lark for free text up to the closing tag, followed by `@answer`. If the prompt has not opened reasoning,
    the answer can also come at once."""
    opening, closing = _lark_sequence(thinking.open, special), _lark_sequence(thinking.close, special)
    if (budget := thinking.budget) is not None:
        opening, tag = f"<[{budget.open_id}]>", re.escape(thinking.close).replace("/", r"\/")
        text = f"text[max_tokens={budget.max_tokens}]: TEXT" if budget.max_tokens else 'text: ""'
        rules = [f"thought: text <[{budget.close_id}]>", text, f"TEXT: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/"]
    elif closing.startswith("<["):
        rules = [f"thought: TEXT {closing}", "TEXT: /(?s:.*)/"]
    else:
        rules = [f"thought[suffix={_literal(thinking.close)}]: /(?s:.*)/"]
    answer = f"{_lark_sequence(thinking.before_answer, special)} @{ANSWER}"
    thought = "thought BLANK?" if thinking.opened else f"(BLANK? {opening} thought BLANK?)?"
    return "\n".join([f"start: {thought} {answer}", *rules, f"BLANK: {BLANK}"]) + "\n"


def _lark_sequence(text: str, special: Mapping[str, int]) -> str:
    """Returns `text` in the form for a Lark rule: special tokens by their ids, and strings between them."""
    tags = sorted((tag for tag in special if tag and tag in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else _literal(piece) for piece in pieces if piece)


def _literal(text: str) -> str:
    """Returns a Lark string, which has the same escapes as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _prepared(piece: str, found: re.Match[str], *, special: Mapping[str, int]) -> str:
    """Checks a string or a regular expression of Lark. Replaces a string that is a special token by that token."""
    if found["string"] is None and found["regex"] is None:
        return piece
    if found["string_end"] is None and found["regex_end"] is None:
        raise GrammarError(f"the string or regular expression at character {found.start()} does not end on its line")
    if len(piece) > MAX_TEXT_CHARS:
        raise GrammarError(f"a string has {len(piece)} characters; at most {MAX_TEXT_CHARS} are allowed")
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
    except RecursionError as exc:
        raise GrammarError(f"the JSON at character {start} is nested too deeply") from exc
    except json.JSONDecodeError as exc:
        raise GrammarError(f"the JSON at character {start} is invalid: {exc}") from exc
