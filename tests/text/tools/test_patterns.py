"""Patterns of schemas match the same complete strings as Python's `re` finds them in."""

import random
import re

import pytest

from motet.text.tools.patterns import FORMATS, Unsupported, literal, regex_of_pattern, without
from tests.text.tools.walks import Walker

PIECES = (
    *(
        "a",
        "b",
        "[ab]",
        "[^a]",
        "[a-c0-2]",
        ".",
        r"\d",
        r"\w",
        r"\s",
        r"\.",
        r"\/",
        "(a|b)",
        "(?:ab)",
        "x*",
        "y+",
        "z?",
    ),
    *(
        "a{2}",
        "b{1,2}",
        r"[\]\-]",
        "[-a]",
        r"[^\d]",
        r"\u0041",
        "-",
        " ",
        "<",
        "&",
        "[&~]",
        r"\-",
        r"\t",
        "{",
        "}",
        "|",
    ),
)
CHARS = "ab012xyz-.]/&~<A {}\t\n"


def walker(regex: str) -> Walker:
    return Walker(f"%llguidance {{}}\nstart: /{regex}/\n")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_pattern_matches_what_python_finds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        body = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 5)))
        pattern = rng.choice(("", "^")) + body + rng.choice(("", "$"))
        found, allowed = re.compile(pattern.replace("$", r"\Z"), re.ASCII), walker(regex_of_pattern(pattern).source)
        for _ in range(20):
            text = "".join(rng.choice(CHARS) for _ in range(rng.randrange(6)))
            assert allowed.allows(text) is (found.search(text) is not None), (pattern, text)
            if allowed.allows(text) and "<" in text:
                assert regex_of_pattern(pattern).may_have_tags


@pytest.mark.parametrize("pattern", ["^[0-9]{4}$", "^[a-zA-Z_]+$", "^(a|b)c?$", r"^\d\w\s$"])
def test_a_pattern_without_tags_is_known(pattern: str) -> None:
    assert not regex_of_pattern(pattern).may_have_tags


@pytest.mark.parametrize("pattern", ["^[0-z]$", "a", "^a", "^[^a]$", "^.$", r"^\D$", r"^\x3c$", r"^\<$", r"^\p{S}$"])
def test_a_pattern_that_can_have_tags_is_known(pattern: str) -> None:
    assert regex_of_pattern(pattern).may_have_tags


UNSUPPORTED = [
    *("(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?i)a", r"(a)\1", r"\ba", r"\B", r"\k<a>", "(", "a)", "[a", "[]"),
    *("a^", "(^a)", "a$b", "(a$)", r"\ud800", r"\u{110000}", r"\c", "a\\"),
]


@pytest.mark.parametrize("pattern", UNSUPPORTED)
def test_other_patterns_are_unsupported(pattern: str) -> None:
    with pytest.raises(Unsupported):
        regex_of_pattern(pattern)


@pytest.mark.parametrize("tag", ["</p>", "</arg_value>", "<ab"])
def test_a_text_without_a_tag_can_have_any_part_of_it(tag: str) -> None:
    allowed, rng = walker(without(tag)), random.Random(1)
    for _ in range(200):
        text = "".join(
            rng.choice(["<", "</", "/", "p", ">", tag, tag[:-1], "a", "\n", "é"]) for _ in range(rng.randrange(6))
        )
        assert allowed.allows(text) is (tag not in text), text


@pytest.mark.parametrize("text", ["", "a", "<|im_end|>", "a/b\\c\n\t\"'", "é🙂", ".*+?()[]{}^$|&~-#"])
def test_a_literal_matches_its_text_alone(text: str) -> None:
    allowed = walker(literal(text))
    assert allowed.allows(text)
    assert not allowed.allows(text + "a")


@pytest.mark.parametrize("name", FORMATS)
def test_no_string_of_a_format_has_tags(name: str) -> None:
    regex = FORMATS[name]
    assert not regex.may_have_tags
    combined = Walker(f"%llguidance {{}}\nstart: T\nT: /{regex.source}/ & /(?s:.*)\\x{{3c}}(?s:.*)/\n")
    assert combined.walk(random.Random(1), max_tokens=1) in (None, "")
