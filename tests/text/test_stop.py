"""Stop strings are found in text that arrives in pieces."""

import pytest

from motet.text.stop_strings import ReleasedText, StopMatcher, StopStrings

FOUND: dict[str, tuple[str, list[str], list[ReleasedText]]] = {
    "text without a stop string is released at once": ("END ###", ["hello "], [ReleasedText("hello ")]),
    "the text after it is not part of the answer": ("END", ["1 END 2"], [ReleasedText("1 ", "END", " 2")]),
    "the start of a stop string is held across pieces": (
        "END",
        ["oneE", "N", "D!"],
        [ReleasedText("one"), ReleasedText(""), ReleasedText("", "END", "!")],
    ),
    "text that cannot match any more is released": (
        "abcd bx",
        ["zab", "c", "x"],  # "ab" of "abcd", "b" of "bx"
        [ReleasedText("z"), ReleasedText(""), ReleasedText("abcx")],
    ),
    "only the suffix that can still match stays held": (
        "aab",
        ["aa", "a", "b"],
        [ReleasedText(""), ReleasedText("a"), ReleasedText("", "aab")],
    ),
    "the first complete stop string counts": ("abcd bc", ["abcd"], [ReleasedText("a", "bc", "d")]),
    "the order in which they are named does not matter": ("two one", ["one two"], [ReleasedText("", "one", " two")]),
    "the longer of two that are complete at once counts": ("c abc bc", ["abc"], [ReleasedText("", "abc")]),
    "a longer one that does not match does not count": ("c abc bc", ["xbc"], [ReleasedText("x", "bc")]),
}
"""Stop strings, the pieces of a text, and the text released after each piece."""


@pytest.mark.parametrize("name", FOUND)
def test_stop_strings_are_found_and_their_starts_are_held(name: str) -> None:
    strings, pieces, released = FOUND[name]
    matcher = StopMatcher(StopStrings(strings.split()))
    assert list(map(matcher.feed, pieces)) == released
    assert (matcher.num_held, matcher.close()) == (0, "")


def test_closing_returns_the_held_text() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.feed("the EN") == ReleasedText("the ")
    assert (matcher.num_held, matcher.close(), matcher.close()) == (2, "EN", "")


def test_the_search_starts_again_after_a_stop_string() -> None:
    matcher = StopMatcher(StopStrings(["aa"]))
    assert matcher.feed("aaa") == ReleasedText("", "aa", "a")
    assert matcher.feed("ab") == ReleasedText("ab")


def test_a_piece_in_which_stopping_is_not_allowed_is_plain_text() -> None:
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.feed("ab", may_stop=False) == ReleasedText("ab")
    assert matcher.feed("xab") == ReleasedText("x", "ab")


def test_a_stop_string_counts_if_its_end_is_where_stopping_is_allowed() -> None:
    matcher = StopMatcher(StopStrings(["aa"]))
    assert matcher.feed("aa", may_stop=False) == ReleasedText("a")
    assert matcher.feed("a") == ReleasedText("", "aa")


@pytest.mark.parametrize("strings", [("",), ("a", "")])
def test_stop_strings_must_not_be_empty(strings: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopStrings(strings)
