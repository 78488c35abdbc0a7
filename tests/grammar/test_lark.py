"""Lark grammars: tags become tokens, limits hold, and schemas inside them are checked."""

import pytest

from motet.errors import GrammarError
from motet.grammar.grammar_source import prepared_lark
from motet.grammar.limits import MAX_LEVELS, MAX_TEXT_CHARS
from tests.grammar.models import follows, grammars_of, lark, regex
from tests.tiny_tokenizer import IM_START

TAG = {"<tool>": 7, 'a"b': 8}


def prepared(source: str) -> str:
    return prepared_lark(source, TAG, rewrite_json=lambda schema: f"<<{schema}>>")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('start: "<tool>" name', "start: <[7]> name"),
        ('start: ("<tool>" | "x")*', 'start: (<[7]> | "x")*'),
        (r'start: "a\"b"', "start: <[8]>"),
        ('start: "<tool>x"', 'start: "<tool>x"'),
        ('start: "<tool>"i', 'start: "<tool>"i'),
        ('start: /"<tool>"/ "<tool>"', 'start: /"<tool>"/ <[7]>'),
        ('start: "a" // "<tool>"', 'start: "a" // "<tool>"'),
        ('# "<tool>"\nstart: "<tool>"', '# "<tool>"\nstart: <[7]>'),
        ('start: %json {"const": "<tool>"} "<tool>"', 'start: %json <<{"const": "<tool>"}>> <[7]>'),
        ('A: %regex {"substring_chars": "<tool>"}', 'A: %regex {"substring_chars": "<tool>"}'),
    ],
)
def test_tags_become_tokens_where_they_are_string_literals(source: str, expected: str) -> None:
    assert prepared(source) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('start: "a', "does not end on its line"),
        ("start: /a", "does not end on its line"),
        ('start: "' + r"\"" * 100_000, "does not end on its line"),
        ("start: %json {", "is invalid"),
        (f'start: "{"a" * MAX_TEXT_CHARS}"', "characters"),
        ("start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(MAX_LEVELS)), "rules and groups"),
        ("start: " + '("a" ' * MAX_LEVELS + ")" * MAX_LEVELS, "rules and groups"),
    ],
)
def test_a_grammar_that_is_too_large_or_incomplete_is_refused(source: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        prepared(source)


def test_a_chain_of_rules_up_to_the_limit_compiles() -> None:
    """Without a limit, a few thousand rules overflow llguidance's stack, which ends the process."""
    rules = "".join(f'r{i}: "a" r{i + 1}?\n' for i in range(MAX_LEVELS - 2))
    grammar = lark(f'start: r0\n{rules}r{MAX_LEVELS - 2}: "z"\n')
    assert follows(grammars_of(), grammar, "aaa")


def test_many_rules_of_gbnf_are_refused_before_they_are_converted() -> None:
    source = "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(MAX_LEVELS)) + 'root ::= "a"'
    with pytest.raises(GrammarError, match="rules"):
        grammars_of().get(lark(source))


def test_schemas_inside_lark_are_checked_and_their_white_space_is_limited() -> None:
    with pytest.raises(GrammarError, match=r"at items.contains: the keyword"):
        grammars_of().get(lark('start: "a" %json {"items": {"contains": {"type": "null"}}}'))
    grammar = lark('start: "a" %json {"type": "array"}')
    assert follows(grammars_of(), grammar, "a[ 1,\n2]")
    assert not follows(grammars_of(), grammar, "a[\n\n\n1]")


def test_a_tag_in_a_terminal_is_refused_and_not_generated_as_text() -> None:
    with pytest.raises(GrammarError, match="special tokens"):
        grammars_of().get(lark(f'start: A\nA: "{IM_START}"'))


def test_a_regular_expression_can_have_slashes_and_line_breaks() -> None:
    assert follows(grammars_of(), regex("a/b\n/"), "a/b\n/")
    with pytest.raises(GrammarError, match="unclosed group"):
        grammars_of().get(regex("("))
