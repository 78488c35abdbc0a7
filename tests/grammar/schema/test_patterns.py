"""Patterns of strings and of the names of properties match exactly."""

import json
import re

import pytest

from motet.errors import GrammarError
from motet.grammar.schema.client_schema import read_schema
from motet.grammar.schema.patterns import matches
from tests.grammar import models
from tests.grammar.models import follows, grammars_of

GRAMMARS = grammars_of()
TEXTS = ("a", '"', "\\", "\n", "\t", "\x01", "\x1f", "\x7f", " ", "é", "]", "^", "-", "aa", "a\\", '"a')


@pytest.mark.parametrize(
    "pattern",
    [
        '^[^"]$',
        r"^[^\\]$",
        r'^[^"\\]+$',
        r"^[\x00-\x1f]$",
        r"^[\u0000-!#-\uffff]$",
        r"^[^a]$",
        r"^[^\n]$",
        r"^[^\]]$",
        r"^[\^\]-]$",
        r'^[^\w"]$',
        r"^[\S]$",
        r"^\W$",
        "^.$",
        r"^[\s\S]$",
        r"^[^\s]a?$",
        r'^(?:[^"]|\n)$',
    ],
)
def test_a_class_matches_what_it_says_whatever_json_escapes(pattern: str) -> None:
    schema = models.json(json.dumps({"type": "string", "pattern": pattern}))
    standard = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    found = {text for text in TEXTS if follows(GRAMMARS, schema, json.dumps(text, ensure_ascii=False))}
    assert found == {text for text in TEXTS if standard.search(text)} - {"\x7f"}


def test_names_of_properties_follow_such_patterns_too() -> None:
    schema = models.json(
        json.dumps({"type": "object", "patternProperties": {'^[^"]$': {}}, "additionalProperties": False})
    )
    assert follows(GRAMMARS, schema, '{"a":1}') and not follows(GRAMMARS, schema, '{"\\"":1}')


@pytest.mark.parametrize("pattern", [r"\x00", r"a\0", r"[a\u0000]", r"[\p{Cc}]", r"\pC", "[[:cntrl:]]"])
def test_a_pattern_with_null_or_only_control_characters_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"at items\.pattern: .* is not supported in a pattern"):
        read_schema(json.dumps({"items": {"pattern": pattern}}))


def test_a_match_is_not_certain_where_engines_disagree() -> None:
    assert matches("^a", "ab") is True and matches("^a", "b") is False
    assert matches(r"(?=a)", "a") is None and matches(r"\s", "é") is None
