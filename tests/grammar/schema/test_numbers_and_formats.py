"""Numbers are exact, and formats follow their standards or are annotations."""

import json
import re
from calendar import monthrange
from datetime import date
from itertools import product

import pytest
from jsonschema import Draft202012Validator

from motet.errors import GrammarError
from motet.grammar.schema.client_schema import read_schema
from motet.grammar.schema.formats import PATTERNS
from motet.grammar.schema.numbers import NEXT_TO_ZERO
from tests.grammar import models
from tests.grammar.models import follows, grammars_of

GRAMMARS = grammars_of()
Schema = dict[str, object]


def allows(schema: Schema, text: str) -> bool:
    return follows(GRAMMARS, models.json(json.dumps(schema)), text)


def number(**bounds: object) -> Schema:
    return {"type": "number", **bounds}


def text(**more: object) -> Schema:
    return {"type": "string", **more}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (number(exclusiveMinimum=0, maximum=0.5), "0.1 0.5 0.0000001", "0 0.0 -0 0.51"),
        (number(exclusiveMinimum=0, maximum=1), "0.1 1 1.0 0.50 0.999", "0 0.0 -0 1.01"),
        (number(exclusiveMinimum=0, exclusiveMaximum=1), "0.1 0.999", "0 0.0 1 1.0"),
        (number(exclusiveMinimum=10, maximum=10.5), "10.1 10.5 10.001", "10 10.0 10.00 10.51"),
        (number(minimum=-1.5, exclusiveMaximum=-1), "-1.5 -1.1", "-1 -1.0 -0.9"),
        (number(minimum=-0.5, exclusiveMaximum=0), "-0.5 -0.1", "0 -0 -0.0 0.1"),
        (number(exclusiveMinimum=0.5, maximum=0.75), "0.51 0.75", "0.5 0.50 0.76"),
        (number(exclusiveMinimum=0), "0.1 7 12.5", "0 -1 0.0"),
        (number(exclusiveMinimum=0, minimum=0.25, maximum=0.5), "0.25 0.3", "0 0.2"),
        (number(exclusiveMinimum=True, minimum=10, maximum=10.5), "10.1", "10 10.0"),
        (number(exclusiveMinimum=False, minimum=10, maximum=10.5), "10 10.1", "9.9"),
        (number(exclusiveMinimum=0, maximum=0.5, multipleOf=0.25), "0.25", "0 0.00 0.75"),
        ({"allOf": [number(exclusiveMinimum=0), number(maximum=0.5)]}, "0.1 0.5", "0 0.0"),
        ({"type": ["integer", "null"], "exclusiveMinimum": 4, "exclusiveMaximum": 6}, "5 null", "4 6"),
        ({"type": "integer", "exclusiveMinimum": 4, "maximum": 6}, "5 6", "4 7"),
    ],
)
def test_an_exclusive_bound_is_not_allowed(schema: Schema, good: str, bad: str) -> None:
    assert [value for value in good.split() if not allows(schema, value)] == []
    assert [value for value in bad.split() if allows(schema, value)] == []


def test_an_exclusive_bound_on_the_side_of_zero_becomes_the_next_number() -> None:
    assert read_schema('{"exclusiveMinimum":10}') == {"minimum": 10.0000000000001}
    assert read_schema('{"exclusiveMaximum":-0.5}') == {"maximum": -0.500000000000001}
    assert read_schema('{"exclusiveMaximum":0}') == {"maximum": -NEXT_TO_ZERO}
    for unchanged in (
        '{"exclusiveMinimum":1e16}',
        '{"exclusiveMinimum":-1}',
        '{"exclusiveMaximum":1}',
        '{"type":"integer","exclusiveMinimum":10}',
    ):
        assert read_schema(unchanged) == json.loads(unchanged)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "maximum": 2**53 + 1}, f"{2**53} 7", f"{2**53 + 1} {2**53 + 2}"),
        ({"type": "integer", "minimum": -(2**63)}, f"{-(2**63) + 1024} 5", f"{-(2**63)} {-(2**63) - 1}"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, f"0 {2**63 - 1024}", f"{2**63} -1"),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "0 5", f"{2**64} -1"),
        (number(minimum=-3.4e38, maximum=3.4e38), "1.5 -20", "1" + "0" * 39),
        ({"const": 2**60}, str(2**60), str(2**60 + 1)),
        ({"enum": [0.125, 123456789.012345]}, "0.125 123456789.012345", "123456789.012346"),
    ],
)
def test_large_numbers_are_exact_or_inside_their_bounds(schema: Schema, good: str, bad: str) -> None:
    assert [value for value in good.split() if not allows(schema, value)] == []
    assert [value for value in bad.split() if allows(schema, value)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**60 + 1}, f"at const: {2**60 + 1} cannot be generated exactly"),
        ({"enum": ["a", {"b": [1234567890123456789]}]}, "at enum: 1234567890123456789 cannot be generated exactly"),
        ({"const": 0.1234567890123456}, "at const: 0.1234567890123456 cannot be generated exactly"),
        ({"const": 1e300}, "at const: 1e+300 cannot be generated exactly"),
        (
            {"items": {"minimum": 2**64}},
            f"at items.minimum: {2**64} is too far from 0; 'minimum' must be at most {2**63 - 1024}",
        ),
        (
            {"exclusiveMaximum": -(2**64)},
            f"at exclusiveMaximum: {-(2**64)} is too far from 0; 'exclusiveMaximum' must be at least {1024 - 2**63}",
        ),
    ],
)
def test_a_number_that_would_be_another_one_is_refused(schema: Schema, message: str) -> None:
    with pytest.raises(GrammarError) as refused:
        read_schema(json.dumps(schema))
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("low", "high"),
    [("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "exclusiveMaximum")],
)
def test_bounds_that_allow_no_value_are_refused(low: str, high: str) -> None:
    with pytest.raises(GrammarError, match=f"at {low}: '{low}' and '{high}' are both 5, so no value is valid"):
        read_schema(json.dumps({low: 5, high: 5}))
    with pytest.raises(GrammarError, match=f"at {low}: '{low}' 6 is greater than '{high}' 5, so no value is valid"):
        read_schema(json.dumps({low: 6, high: 5}))


def test_the_pattern_of_dates_matches_the_days_of_the_calendar() -> None:
    dates = re.compile(PATTERNS["date"])
    for number in range(1, 10000):
        assert (dates.match(f"{number:04}-02-29") is not None) == (monthrange(number, 2)[1] == 29)
    years = ("0000", "0001", "1900", "2000", "2023", "2024", "9999")
    for year, month, day in product(years, range(14), range(33)):
        value = f"{year}-{month:02}-{day:02}"
        assert (dates.match(value) is not None) == is_date(value), value


def is_date(value: str) -> bool:
    try:
        date.fromisoformat(value)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (text(format="date"), "2024-02-29 0001-01-01", "2026-02-29 1900-02-29 0000-01-01 0000-02-29 2026-2-1"),
        (
            text(format="time"),
            "12:00:59Z 00:00:00.123456789-23:59",
            "12:00:60Z 24:00:00Z 12:00:00 12:00:00.1234567890Z",
        ),
        (text(format="date-time"), "2024-02-29T12:00:00+01:00", "2023-02-29T12:00:00Z 2024-01-01T12:00:60Z"),
        (text(format="date", pattern="^20"), "2024-02-29", "1999-01-01 2023-02-29 20"),
        (text(format="date", pattern="^20", allOf=[text(maxLength=10)]), "2024-02-29", "1999-01-01 2023-02-29"),
        (text(format="hostname"), "example.org a--b a-b.c", "xn--a XN--a b.xn--a -a a- a..b"),
        (text(format="hostname"), f"{'a' * 63}.b", f"{'a' * 64}.b"),
        (text(format="hostname"), f"{'a.' * 126}a", f"{'a.' * 127}a"),
        (text(format="hostname", maxLength=3), "a.b", "abcd"),
        (text(format="hostname", pattern="a$"), "b.a", "a.b xn--a"),
    ],
)
def test_formats_follow_their_standards(schema: Schema, good: str, bad: str) -> None:
    assert [value for value in good.split() if not allows(schema, f'"{value}"')] == []
    assert [value for value in bad.split() if allows(schema, f'"{value}"')] == []


REFERENCES = (
    "",
    "a",
    "a/b:c",
    "/",
    "//host:8/p",
    "?q#f",
    "http://u@h.org/a%20b?c#d",
    "mailto:a@b",
    "a:",
    "../x",
    "urn:a:b",
)
NO_REFERENCES = ("a b", "%", "1:b", "http://[", "#a#b", "a%2", "\\", "<a>", ":a")
TEMPLATES = ("", "/a/{b}", "{+x,y*}{?q:3}", "http://a/{/b.c}", "a%20")
NO_TEMPLATES = ("{", "{a", "}", "{a b}", "{?}", "a b", "{a:0}", "%")
POINTERS, NO_POINTERS = ("", "/", "/a~0b/~1", "//"), ("a", "/~", "/~2", "~0")
CASES = {
    "uri-reference": (REFERENCES, NO_REFERENCES),
    "iri-reference": ((*REFERENCES, "é/ü?ä", "http://é"), NO_REFERENCES),
    "uri-template": (TEMPLATES, NO_TEMPLATES),
    "json-pointer": (POINTERS, NO_POINTERS),
    "relative-json-pointer": (("0", "10/a", "1#"), ("01", "-1", "a", "1a", "1##")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_is_at_least_as_strict_as_its_standard(name: str) -> None:
    good, bad = CASES[name]
    standard = Draft202012Validator({"format": name}, format_checker=Draft202012Validator.FORMAT_CHECKER)
    assert [value for value in good if not allows(text(format=name), json.dumps(value, ensure_ascii=False))] == []
    assert [value for value in good if not standard.is_valid(value)] == []
    assert [value for value in bad if allows(text(format=name), json.dumps(value, ensure_ascii=False))] == []


def test_a_format_applies_only_to_strings() -> None:
    schema: Schema = {"type": ["string", "integer"], "format": "date", "pattern": "1$"}
    assert allows(schema, "7") and allows(schema, '"2024-02-01"') and not allows(schema, '"2024-02-02"')


@pytest.mark.parametrize("schema", [{"type": "integer", "format": "int64"}, {"type": "number", "format": "date"}])
def test_a_format_next_to_another_type_is_an_annotation(schema: Schema) -> None:
    assert allows(schema, "7")


@pytest.mark.parametrize("name", ["isbn", "regex", "", "int32"])
def test_a_format_that_is_not_known_is_an_annotation(name: str) -> None:
    assert allows(text(format=name), '"any text"')
