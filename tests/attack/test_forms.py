"""Grammars of a few characters that would cost gigabytes, or seconds at every token."""

import json
import random
import time
from collections.abc import Mapping

import numpy as np
import pytest

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import Matcher, fill_masks, mask_words
from motet.grammar.forced import MAX_FORCED, NO_FORCING
from motet.grammar.grammar_source import llguidance_source
from motet.grammar.schema.keywords import ONE_LINE
from motet.system.machine import process_memory
from motet.types import Grammar, GrammarKind, Thinking
from tests.grammar.models import TOKENIZER, VOCAB_SIZE, follows, grammars_of, lark, regex

DEEP = {"type": "array", "minItems": 100, "items": {"const": "abcdefgh" * 100}}


def schema(**fields: object) -> Grammar:
    return Grammar(GrammarKind.JSON, json.dumps(fields))


def in_one_line(fields: Mapping[str, object]) -> Grammar:
    """Returns a schema in the layout of tool calls: no optional white space interrupts the forced text."""
    return schema(**fields, **{"x-guidance": ONE_LINE})


REPEATED = {
    "regex": regex("((((a{50}){50}){50}){51})"),
    "regex of one letter": regex("[a-a]{100000}"),
    "open regex": regex("(a|a){50000,}"),
    "pattern": schema(type="string", pattern="^((((a{50}){50}){50}){51})$"),
    "pattern and length": schema(
        allOf=[{"type": "string", "pattern": "^a*$"}, {"type": "string", "minLength": 100_000}]
    ),
    "terminal": lark(f'start: A{{500}}\nA: "{"abcdefghij" * 3}"{{100}}'),
    "rules": lark('start: a{100}\na: b{100}\nb: "x"{30}'),
    "gbnf": lark('root ::= a{90}\na ::= b{90}\nb ::= "ab"{30}'),
    "doubled rules": lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(20)) + '\nr20: "abc"'),
    "options in the grammar": lark('start: A{500}\nA: "abcdefghij"{300}\n%llguidance {"no_forcing": false}'),
    "letters without limit": lark('start: A A A\nA: "a"+'),
    "regexes without limit": lark("start: a{3,5}\na: /(ab)+/"),
    "counts without limit": lark('start: (A | A){3,5}\nA: "é"{2,}'),
    "arrays": in_one_line({"type": "array", "minItems": 100, "items": {**DEEP, "items": DEEP}}),
    "references": in_one_line(
        {
            "$ref": "#/$defs/a0",
            "$defs": {
                **{f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(12)},
                "a12": {"const": "abcdefgh"},
            },
        }
    ),
}


def busy_s(matcher: Matcher, *, tokens: int = 4) -> float:
    """Returns the CPU time for the masks of the next tokens. Each token is one that the mask allows."""
    out = np.zeros((1, mask_words(VOCAB_SIZE)), np.int32)
    started_s = time.thread_time()
    for _ in range(tokens):
        if fill_masks([matcher], out):
            break
        matcher.consume(int(np.flatnonzero(np.unpackbits(out.view(np.uint8)[0], bitorder="little"))[0]))
    return time.thread_time() - started_s


@pytest.mark.parametrize("thinking", [None, Thinking("<think>", "</think>", opened=False)])
@pytest.mark.parametrize("grammar", REPEATED.values(), ids=REPEATED)
def test_a_short_grammar_of_a_long_text_costs_no_more_than_others(grammar: Grammar, thinking: Thinking | None) -> None:
    grammars = grammars_of()
    grammars.get(regex("a"))
    before_mb, started_s = (process_memory().resident_bytes >> 20), time.thread_time()
    compiled = grammars.get(Grammar(grammar.kind, grammar.source, thinking))
    assert busy_s(compiled.matcher()) < 0.02
    assert time.thread_time() - started_s < 0.1
    assert (process_memory().resident_bytes >> 20) - before_mb <= 4


@pytest.mark.parametrize(
    ("grammar", "forces_much"),
    [
        (regex(r"\d{4}-\d{2}-\d{2}"), False),
        (regex("yes|no"), False),
        (regex("a" * (MAX_FORCED + 1)), True),
        (schema(type="object", properties={"name": {"type": "string"}, "age": {"type": "integer"}}), False),
        (schema(type="string", enum=["x" * 100] * 100), False),
        (lark('start: "<call>" name "(" args ")"\nname: "f" | "g"\nargs: %json {"type": "object"}'), False),
        (lark('start: expr\nexpr: "(" expr ")" | /[0-9]+/'), True),
    ],
)
def test_usual_grammars_keep_the_tokens_of_the_tokenizer_for_fixed_text(grammar: Grammar, forces_much: bool) -> None:
    assert (json.dumps(NO_FORCING)[1:-1] in llguidance_source(grammar, {})) is forces_much


@pytest.mark.slow
def test_a_long_forced_text_is_allowed_in_any_tokens() -> None:
    grammars, word = grammars_of(), regex("(abc){2000}")
    assert follows(grammars, word, "abc" * 2000)
    assert not follows(grammars, word, "abc" * 1999)
    array = in_one_line({"type": "array", "minItems": 600, "maxItems": 600, "items": {"const": "abcdefgh"}})
    assert follows(grammars, array, json.dumps(["abcdefgh"] * 600))


@pytest.mark.slow
def test_the_limit_of_lexer_states_ends_an_answer_before_they_take_much_memory() -> None:
    matcher = grammars_of().get(regex(r"(\w*a\w{18}x)")).matcher()
    out = np.zeros((1, mask_words(VOCAB_SIZE)), np.int32)
    letters = [TOKENIZER.encode(letter)[0] for letter in "ab"]
    before_mb, rng = (process_memory().resident_bytes >> 20), random.Random(1)
    with pytest.raises(GrammarError, match="too many states"):
        for _ in range(20_000):
            fill_masks([matcher], out)
            matcher.consume(rng.choice(letters))
    assert (process_memory().resident_bytes >> 20) - before_mb < 40, "without the limit it is 22 MB per 1800 tokens"
