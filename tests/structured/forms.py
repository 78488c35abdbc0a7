"""Forms that requests require with `structured_outputs`: regular expressions, choices and grammars."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """One form, and a check of answers in this form."""

    name: str
    structured_outputs: dict[str, object]
    message: str
    """User message of the request."""
    follows: Callable[[str], bool]
    few_answers: bool = False
    """True if the form allows so few answers that several choices can be equal."""


def regex(name: str, pattern: str, message: str) -> Form:
    """Returns a form whose oracle is Python's `re`, so the pattern must have the same meaning there as in Rust."""
    return Form(name, {"regex": pattern}, message, matching(pattern))


def choice(name: str, choices: list[str], message: str) -> Form:
    return Form(name, {"choice": choices}, message, lambda text: text in choices, few_answers=True)


def matching(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def balanced(text: str) -> bool:
    """Returns True if every bracket of the text is closed."""
    while "()" in text or "[]" in text:
        text = text.replace("()", "").replace("[]", "")
    return text == ""


CHESS = """
root ::= move (" " move){1,3}
move ::= [0-9] ". " (pawn | piece) " " (pawn | piece)
pawn ::= [a-h] [1-8]
piece ::= [NBKQR] [a-h] [1-8]
"""
SQL = """
start: "SELECT " columns " FROM " NAME (" WHERE " NAME " = " INT)? ";"
columns: "*" | NAME ("," NAME)~0..2
NAME: /[a-z]{1,8}/
INT: /[0-9]{1,4}/
"""
BRACKETS = """
start: pair~1..3
pair: "(" inner? ")" | "[" inner? "]"
inner: last~1..2
last: "()" | "[]" | "([])"
"""
JSON_INSIDE = """
start: "TEMPERATURE " %json {"type": "object", "properties": {"t": {"type": "integer", "minimum": -40, "maximum": 50}},
                             "required": ["t"], "additionalProperties": false}
"""

FORMS = (
    regex("regex_phone", r"\+[0-9]{2} [0-9]{3} [0-9]{4,6}", "Your phone number?"),
    regex("regex_sentence", r"[A-Z][a-z]{1,10}( [a-z]{1,10}){2,6}\.", "Tell me something about cats."),
    regex("regex_date", r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", "When was it?"),
    regex("regex_of_several_lines", r"(- [a-z ]{3,20}\n){2,4}", "A shopping list, please."),
    regex("regex_beyond_ascii", r"(ä|ö|ü|ß|é|[0-9]){3,9}(€|¥|😀)", "How much?"),
    choice("choice_of_words", ["positive", "negative", "neutral"], "Is 'I love it' positive or negative?"),
    choice("choice_of_words_with_a_common_start", ["a", "ab", "abc", "abc def\n"], "Which?"),
    choice("choice_beyond_ascii", ["да", "нет", "はい", "いいえ", "👍🏽", 'so "so"', "\\"], "Yes or no?"),
    Form(
        "grammar_in_lark",
        {"grammar": SQL},
        "All names of people who are 30.",
        matching(r"SELECT (\*|[a-z]{1,8}(,[a-z]{1,8}){0,2}) FROM [a-z]{1,8}( WHERE [a-z]{1,8} = [0-9]{1,4})?;"),
    ),
    Form("grammar_in_lark_with_nested_rules", {"grammar": BRACKETS}, "Write brackets.", balanced),
    Form(
        "grammar_in_lark_with_a_schema",
        {"grammar": JSON_INSIDE},
        "How warm is it?",
        matching(r'TEMPERATURE \{\s*"t"\s*:\s*(-?[1-3]?[0-9]|-?40|4[0-9]|50)\s*\}'),
    ),
    Form(
        "grammar_in_gbnf",
        {"grammar": CHESS},
        "A game of chess, please.",
        matching(r"([0-9]\. ([NBKQR]?[a-h][1-8]) ([NBKQR]?[a-h][1-8])( |$)){2,4}(?<! )"),
    ),
)
