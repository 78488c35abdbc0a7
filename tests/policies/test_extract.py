"""The value of an answer: the piece that each rule finds, and the form in which it is compared."""

import json
from decimal import Decimal

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.extract import (
    MAX_INSTRUCTIONS,
    MAX_TEXT_CHARS,
    MAX_VALUE_CHARS,
    MAX_WORK,
    Extract,
    ExtractError,
    ExtractKind,
    Pattern,
    normalised,
)
from tests.property_settings import examples

LAST_LINE = Extract(ExtractKind.LAST_LINE)
LAST_NUMBER = Extract(ExtractKind.LAST_NUMBER)
BOXED = Extract(ExtractKind.BOXED)


def regex(pattern: str) -> Extract:
    return Extract(ExtractKind.REGEX, pattern)


def pointer(source: str) -> Extract:
    return Extract(ExtractKind.JSON_POINTER, source)


@pytest.mark.parametrize(
    ("piece", "value"),
    [
        ("  Yes,\t it \n is ", "Yes, it is"),
        ("1,000.50", "1000.5"),
        ("42.", "42"),
        ("+007", "7"),
        (".50", "0.5"),
        ("$1,234", "1234"),
        ("-$5.00", "-5"),
        ("\u22125", "-5"),
        ("50%", "50"),
        ("-0", "0"),
        ("-0.00", "0"),
        ("000", "0"),
        # Not numbers:
        ("1,23", "1,23"),
        ("1,2345", "1,2345"),
        ("1e5", "1e5"),
        ("5 %", "5 %"),
        ("--5", "--5"),
        (".", "."),
        ("$", "$"),
        ("\u0663", "\u0663"),
        ("", None),
        (" \n\u00a0", None),
        ("x" * MAX_VALUE_CHARS, "x" * MAX_VALUE_CHARS),
        ("x" * (MAX_VALUE_CHARS + 1), None),
    ],
)
def test_a_piece_is_brought_into_one_form(piece: str, value: str | None) -> None:
    assert normalised(piece) == value


@given(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4),
    st.sampled_from(["{:f}", "{:,f}", "{:+f}", "{:+,f}", "{:f}0", "{:f}%", " {:f}\n"]),
)
def test_every_way_to_write_a_number_has_the_same_value(number: Decimal, form: str) -> None:
    value = normalised(form.format(number))
    assert value is not None and Decimal(value) == number
    assert value == normalised(value) == normalised(f"{number.normalize():f}")


@pytest.mark.slow
@given(st.text("01,.+-$%\u2212 \n\u00a0aé"))
def test_a_value_does_not_change_when_it_is_brought_into_its_form_again(text: str) -> None:
    value = normalised(text)
    assert value is None or normalised(value) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("So:\n\n  Answer:  B \r\n \n\t\n", "Answer: B"),
        ("one", "one"),
        ("first\n1,000.0", "1000"),
        ("", None),
        ("\n \n", None),
        ("x\n" + "y" * (MAX_VALUE_CHARS + 1), None),
    ],
)
def test_the_rule_for_lines_finds_the_last_one_that_is_not_blank(text: str, value: str | None) -> None:
    assert LAST_LINE.value(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 apples and 4 pears make 7.", "7"),
        ("It costs $1,234.50 in all", "1234.5"),
        ("x = -5", "-5"),
        ("-$5 it is", "-5"),
        ("x = \u22125", "-5"),
        ("10-5", "5"),
        ("(3)-5", "5"),
        ("7 - 5", "5"),
        ("1,2345", "2345"),
        ("1234,567", "567"),
        ("12,345,678", "12345678"),
        ("(1, 2)", "2"),
        ("1.2.3", "2.3"),
        ("so it is...5", "5"),
        ("The end.5", "5"),
        ("about .5", "0.5"),
        ("3/4", "4"),
        ("50%", "50"),
        ("1,000,", "1000"),
        ("no number", None),
        ("", None),
        ("7" * (MAX_VALUE_CHARS + 1), None),
        ("7" + " " * MAX_TEXT_CHARS, None),
    ],
)
def test_the_rule_for_numbers_finds_the_last_number(text: str, value: str | None) -> None:
    assert LAST_NUMBER.value(text) == value


@given(
    st.text("ab 12-,.$"),
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=2),
    st.text("ab -,.$", max_size=8),
)
def test_the_last_number_is_found_whatever_is_around_it(before: str, number: Decimal, after: str) -> None:
    assert LAST_NUMBER.value(f"{before} {number:,f}{after}") == normalised(str(number))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} }", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\tfrac12}", r"\frac12"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{$x^2$}", "x^2"),
        (r"\boxed{\$18}", "18"),
        (r"\boxed{10{,}000}", "10000"),
        (r"\boxed{10,\!000}", "10000"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{ \text{ Yes } }", "Yes"),
        (r"\boxed{5\,\text{cm}}", r"5\text{cm}"),
        (r"\boxed{}", None),
        (r"\boxed{1} \boxed{2", None),
        (r"\fbox{1}", None),
        (r"\boxed{" + "x" * (MAX_VALUE_CHARS + 1) + "}", None),
        (r"\boxed{1}" + " " * MAX_TEXT_CHARS, None),
    ],
)
def test_the_rule_for_boxes_finds_the_content_of_the_last_box(text: str, value: str | None) -> None:
    assert BOXED.value(text) == value


@pytest.mark.parametrize(
    ("pattern", "text", "value"),
    [
        (r"answer is (\d+)", "The answer is 1. The answer is 2.", "1"),
        (r"(?s).*answer is (\d+)", "The answer is 1.\nThe answer is 2.", "2"),
        (r"[A-D]\b", "It is B, not C", "B"),
        (r"(a)|b", "b", None),
        (r"x()", "x", None),
        (r"(\w+) (\w+)", "one two", "one"),
        (r"ü(.)", "grün", "n"),
        (r"(.+)", "日本", "日本"),
        (r"(?i)YES", "yes", "yes"),
        (r"no", "yes", None),
        (r"=(\S+)", "= =1,000.0", "1000"),
        (r"(\C)", "é", "\ufffd"),
    ],
)
def test_the_rule_for_patterns_finds_the_first_match(pattern: str, text: str, value: str | None) -> None:
    assert regex(pattern).value(text) == value


def test_a_pattern_reads_the_end_of_a_long_text_and_a_larger_pattern_reads_less() -> None:
    assert regex("a(b)").value("ab" + "." * (MAX_TEXT_CHARS - 2)) == "b"
    assert regex("a(b)").value("ab" + "." * (MAX_TEXT_CHARS - 1)) is None
    assert regex("a(b)").value("ab" + "é" * (MAX_TEXT_CHARS // 2)) is None  # it reads bytes
    large = Pattern("a(b)|x{400}")
    assert large.max_bytes == MAX_WORK // re2.compile("a(b)|x{400}").programsize < 2_500
    assert large.find("ab" + "." * (large.max_bytes - 2)) == "b"
    assert large.find("ab" + "." * (large.max_bytes - 1)) is None
    assert large.find("ab" + "é" * (large.max_bytes // 2 - 1)) == "b"


HOSTILE = [
    "(?:a?){500}a{500}",
    "(?:a?){100}a{100}",
    "(x+x+)+y",
    "(a|b)*a(a|b){200}c",
    "((a{30}){30})",
    "((((a*)*)*)*)*$",
    r"\pL{20}",
    r"[\pL\pN]+",
    r"(?i)\w{100}",
    "|".join(f"{i:03d}a" for i in range(190)),
    ".*" * 300,
    "[^a]" * 200,
    "(?s).{400}$",
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_hostile_pattern_is_refused_or_reads_little(pattern: str) -> None:
    instructions = re2.compile(pattern).programsize
    if instructions > MAX_INSTRUCTIONS:
        with pytest.raises(ExtractError, match="too large"):
            Pattern(pattern)
    else:
        assert Pattern(pattern).max_bytes * instructions <= MAX_WORK


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (ExtractKind.REGEX, "", "0 characters: 1 to 1,000 are allowed"),
        (ExtractKind.REGEX, "a" * 1_001, "1,001 characters: 1 to 1,000 are allowed"),
        (ExtractKind.REGEX, "(?:a?){500}a{500}", "too large when compiled: 1,504 instructions, at most 500"),
        (
            ExtractKind.REGEX,
            r"\pL{1000}",
            "pattern too large - compile failed.* at most 500 instructions when compiled",
        ),
        (ExtractKind.REGEX, "(a)" * 11, "has 11 groups, at most 10"),
        (ExtractKind.REGEX, "(?=a)b", r"invalid perl operator: \(\?=. RE2 has no look-around"),
        (ExtractKind.REGEX, "(?<!a)b", r"invalid perl operator: \(\?<!. RE2 has no look-around"),
        (ExtractKind.REGEX, r"(a)\1", r"invalid escape sequence: \\1. RE2 has no .* backreferences"),
        (ExtractKind.REGEX, "(a", r"missing \): \(a"),
        (ExtractKind.REGEX, "a{1001}", r"invalid repetition size: \{1001\}"),
        (ExtractKind.REGEX, "é(", "RE2 cannot compile"),
        (ExtractKind.REGEX, "\ud800", "half of a surrogate pair"),
        (ExtractKind.JSON_POINTER, "answer", "must be empty or begin with '/', as in '/answer': 'answer'"),
        (ExtractKind.JSON_POINTER, "/a~", "'~' is written '~0'"),
        (ExtractKind.JSON_POINTER, "/a~2b", "'~' is written '~0'"),
        (ExtractKind.JSON_POINTER, "/" + "a" * 1_000, "has 1,001 characters, at most 1,000"),
    ],
)
def test_the_error_for_a_rule_that_cannot_be_used_has_the_reason(kind: ExtractKind, source: str, message: str) -> None:
    with pytest.raises(ExtractError, match=message):
        Extract(kind, source)


@pytest.mark.parametrize(
    ("source", "text", "value"),
    [
        ("/answer", ' {"answer": " B  or C "}\n', "B or C"),
        ("/answer", '{"answer": "1,000.0"}', "1000"),
        ("/answer", '{"answer": 1000.0}', "1000"),
        ("/answer", '{"answer": -0.0}', "0"),
        ("/answer", '{"answer": 1E5}', "1e5"),
        ("/answer", '{"answer": 1e999}', "1e999"),
        ("/answer", '{"answer": 0.10000000000000000001}', "0.10000000000000000001"),
        ("/answer", '{"answer": 12345678901234567890123}', "12345678901234567890123"),
        ("/answer", '{"answer": true}', "true"),
        ("/answer", '{"answer": null}', "null"),
        ("/answer", '{"answer": ""}', None),
        ("/answer", '{"other": 1}', None),
        ("/answer", '{"answer": 1', None),
        ("/answer", 'It is {"answer": 1}', None),
        ("/answer", '{"answer": "\ud800"}', None),
        ("/answer", '{"answer": "\\ud800"}', None),
        ("", '{"b": [1.50, {}], "a": "x"}', '{"a":"x","b":[1.5,{}]}'),
        ("/b/1", '{"b": [1, 2]}', "2"),
        ("/b/2", '{"b": [1, 2]}', None),
        ("/b/01", '{"b": [1, 2]}', None),
        ("/b/-", '{"b": [1, 2]}', None),
        ("/b/9999999999", '{"b": [1, 2]}', None),
        ("/b/\u0660", '{"b": [1, 2]}', None),
        ("/b/0", '{"b": {"0": 7}}', "7"),
        ("/b/0", '{"b": "text"}', None),
        ("/a~1b/m~0n", '{"a/b": {"m~n": 1}}', "1"),
        ("/~01", '{"~1": 1, "/": 2}', "1"),
        ("/", '{"": 1}', "1"),
        ("//x", '{"": {"x": 1}}', "1"),
        ("", "[" * 100 + "]" * 100, "[" * 100 + "]" * 100),
        ("", "[" * 101 + "]" * 101, None),
        ("/0", "[7," + "[" * 20_000 + "]" * 20_000 + "]", None),
        ("", "[" * 60_000, None),
        ("/0", "[7," + " " * MAX_TEXT_CHARS + "8]", None),
        ("", "", None),
    ],
)
def test_a_json_pointer_finds_its_part(source: str, text: str, value: str | None) -> None:
    assert pointer(source).value(text) == value


KEYS = st.text("a~/0 é", max_size=3)
Document = None | bool | int | str | list["Document"] | dict[str, "Document"]
DOCUMENTS: st.SearchStrategy[Document] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab~/", min_size=1, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def all_parts(document: Document, source: str = "") -> list[tuple[str, Document]]:
    """Yields every part of a document, with its pointer."""
    items: list[tuple[str, Document]] = []
    if isinstance(document, dict):
        items = [(key.replace("~", "~0").replace("/", "~1"), part) for key, part in document.items()]
    elif isinstance(document, list):
        items = [(str(place), part) for place, part in enumerate(document)]
    return [(source, document)] + [found for key, part in items for found in all_parts(part, f"{source}/{key}")]


@given(DOCUMENTS)
def test_a_pointer_finds_each_part_of_a_document(document: Document) -> None:
    text = json.dumps(document, indent=1)
    for source, part in all_parts(document):
        plain = json.dumps(part, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        assert pointer(source).value(text) == normalised(part if isinstance(part, str) else plain)


RULES = [LAST_LINE, LAST_NUMBER, BOXED, regex("(?s).*(.)"), regex("[^a]+"), pointer("/a")]
ANYTHING = st.text('019aé日\ud800\udfff\U0001f600\u2212 \n\r\t\0+-1,.$%{}[]\\":/')


@examples(200)
@given(ANYTHING | ANYTHING.map(lambda text: "\\boxed{" + text) | ANYTHING.map(lambda text: '{"a":' + text))
def test_no_text_makes_a_rule_fail(text: str) -> None:
    for rule in RULES:
        value = rule.value(text)
        assert value is None or value == normalised(value)


def test_rules_are_equal_if_they_are_the_same_rule() -> None:
    assert regex("a") == regex("a") != regex("b")
    assert {regex("a"), regex("a"), LAST_LINE, BOXED} == {regex("a"), LAST_LINE, BOXED}
    assert repr(regex("a")) == "Extract(kind=<ExtractKind.REGEX: 'regex'>, source='a')"
