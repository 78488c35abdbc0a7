"""Patterns of strings and of the names of properties match exactly."""

import json
import re

import pytest

from motet.errors import GrammarError
from motet.grammar.schema.client_schema import read_schema
from motet.grammar.schema.patterns import ZOD, matches, without_look_ahead
from tests.grammar import models
from tests.grammar.models import follows, grammars_of

GRAMMARS = grammars_of()
TEXTS = (
    "[",
    "&",
    "~",
    "a]",
    "[]",
    "&]",
    '"]',
    "b]",
    "a",
    '"',
    "\\",
    "\n",
    "\t",
    "\x01",
    "\x1f",
    "\x7f",
    " ",
    "é",
    "]",
    "^",
    "-",
    "aa",
    "a\\",
    '"a',
)


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
        "^[^[a]]$",
        "^[[a]]?$",
        "^[[\\]]$",
        "^[a-z&&[^aeiou]]$",
        "^[~~a]$",
        "^[a^[]$",
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # `[` in a class can have another meaning later
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


PYDANTIC = r"^(?!^[-+.]*$)[+-]?0*"
DECIMALS = ["0", "7", "12", "-1.5", "+12.34", "0.5", "1234", "12345", "1234.56", "123.456", "0.005", "1234567", "-0.25"]
NOT_DECIMALS = ["", "-", ".", "+.", "$20.00", "1,5", "1.5 ", "1e5", "abc", "--1", "1.2.3"]


@pytest.mark.parametrize(
    ("end", "limits"),
    [
        (r"\d*\.?\d*$", (99, 99, 99)),
        (r"\d*\.?\d{0,2}0*$", (99, 2, 99)),
        (r"\d*\.?\d{0,0}0*$", (99, 0, 99)),
        (r"(?:\d{0,6}|(?=[\d.]{1,7}0*$)\d*\.\d*0*$)", (6, 5, 6)),
        (r"(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*$)", (4, 2, 6)),
        (r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)", (0, 2, 2)),
        (r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,4}0*$)", (0, 2, 2)),
        (r"(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d{0,3}\.\d{0,0}0*$)", (3, 0, 3)),
    ],
)
def test_decimals_of_pydantic_have_its_digits_and_places(end: str, limits: tuple[int, int, int]) -> None:
    """Pydantic's patterns with a maximum number of digits also match texts that are not decimals, by mistake."""
    schema = models.json(json.dumps({"type": "string", "pattern": PYDANTIC + end}))
    whole, places, digits = limits
    for text in DECIMALS:
        before, _, after = text.lstrip("+-").partition(".")
        before = before.lstrip("0")
        fits = len(before) <= whole and len(after) <= places and len(before + after) <= digits
        assert follows(GRAMMARS, schema, json.dumps(text)) == fits, text
        assert not fits or re.search(PYDANTIC + end, text)
    assert not any(follows(GRAMMARS, schema, json.dumps(text)) for text in NOT_DECIMALS)


@pytest.mark.parametrize("end", ["x", r"\d*\.?\d{0,101}0*$", rf"\d*\.?\d{{0,{'9' * 5000}}}0*$"])
def test_other_patterns_with_look_ahead_are_unchanged(end: str) -> None:
    assert without_look_ahead(PYDANTIC + end) == PYDANTIC + end
    assert without_look_ahead("^(?=a)" + end) == "^(?=a)" + end


def test_patterns_of_zod_match_the_same_texts_without_look_ahead() -> None:
    duration = [*ZOD][1]
    pieces = (
        ["", "1Y", "2M", "3D"],
        ["", "T", "T1H", "T2M", "T3S", "T1H2M", "T1H3,5S", "T2M3.5S", "T1H2M3S", "1W", "T1D"],
    )
    texts = {f"P{date}{more}{time}" for date in pieces[0] for more in pieces[0] for time in pieces[1]}
    names = ["a", ".a", "a.", "a..b", "a.b", "a'", "'a", "a'.b", ".", "", "a-b.c+d", "a b"]
    texts |= {f"{name}@{domain}" for name in names for domain in ("b.co", "b..co", "-b.co", "b-c.d.org", "b.c", "b")}
    for pattern, other in ZOD.items():
        assert (matches(other, "P1Y") is True) == (pattern == duration)
        assert {text for text in texts if re.search(pattern, text)} == {text for text in texts if matches(other, text)}


def test_a_match_is_not_certain_where_engines_disagree() -> None:
    assert matches("^a", "ab") is True and matches("^a", "b") is False
    assert matches(r"(?=a)", "a") is None and matches(r"\s", "é") is None


@pytest.mark.parametrize(
    "pattern", ["^[]a]$", "^[^]a]$", "^[+--]$", "[[:alpha:]]", "[^[:digit:]_]", "(?x)^a b$", "(?ix:a)"]
)
def test_a_pattern_that_engines_read_in_different_ways_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="at pattern: "):
        read_schema(json.dumps({"type": "string", "pattern": pattern}))
