"""Stop strings in text that arrives in pieces."""

import pytest

from motet.text.stop import Released, StopMatcher, StopStrings

FOUND: dict[str, tuple[str, list[str], list[Released]]] = {
    "text without one passes at once": ("END ###", ["hello "], [Released("hello ")]),
    "what follows is no part of the answer": ("END", ["1 END 2"], [Released("1 ", "END", " 2")]),
    "across pieces it is held back": (
        "END",
        ["oneE", "N", "D!"],
        [Released("one"), Released(""), Released("", "END", "!")],
    ),
    "what cannot match any more is shown": (
        "abcd bx",
        ["zab", "c", "x"],  # "ab" of "abcd", "b" of "bx"
        [Released("z"), Released(""), Released("abcx")],
    ),
    "only the suffix that may match stays held": (
        "aab",
        ["aa", "a", "b"],
        [Released(""), Released("a"), Released("", "aab")],
    ),
    "the first to be complete wins": ("abcd bc", ["abcd"], [Released("a", "bc", "d")]),
    "whichever is named first": ("two one", ["one two"], [Released("", "one", " two")]),
    "of two complete together the longer wins": ("c abc bc", ["abc"], [Released("", "abc")]),
    "but no longer than what came": ("c abc bc", ["xbc"], [Released("x", "bc")]),
}
"""Stop strings, the pieces of a text, and what is released of each."""


@pytest.mark.parametrize("name", FOUND)
def test_stop_strings_are_found_and_what_may_become_one_is_held(name: str) -> None:
    strings, pieces, released = FOUND[name]
    matcher = StopMatcher(StopStrings(strings.split()))
    assert list(map(matcher.feed, pieces)) == released
    assert (matcher.num_held, matcher.close()) == (0, "")


def test_closing_gives_what_was_held_back() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.feed("the EN") == Released("the ")
    assert (matcher.num_held, matcher.close(), matcher.close()) == (2, "EN", "")


def test_the_search_begins_anew_behind_what_was_found() -> None:
    matcher = StopMatcher(StopStrings(["aa"]))
    assert matcher.feed("aaa") == Released("", "aa", "a")
    assert matcher.feed("ab") == Released("ab")


def test_a_piece_that_may_not_stop_is_plain_text() -> None:
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.feed("ab", may_stop=False) == Released("ab")
    assert matcher.feed("xab") == Released("x", "ab")


def test_a_stop_string_that_begins_where_none_may_and_ends_where_it_may_counts() -> None:
    matcher = StopMatcher(StopStrings(["aa"]))
    assert matcher.feed("aa", may_stop=False) == Released("a")
    assert matcher.feed("a") == Released("", "aa")


@pytest.mark.parametrize("strings", [("",), ("a", "")])
def test_stop_strings_must_not_be_empty(strings: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopStrings(strings)
