"""Stop strings in text that arrives in pieces."""

import pytest

from motet.text.stop import Released, StopMatcher, StopStrings


def matcher(*strings: str) -> StopMatcher:
    return StopMatcher(StopStrings(strings))


def test_text_without_a_stop_string_passes_at_once() -> None:
    m = matcher("END", "###")
    assert m.feed("hello ") == Released("hello ")
    assert m.num_held == 0


def test_a_stop_string_is_found_and_what_follows_is_dropped() -> None:
    assert matcher("END").feed("one END two") == Released("one END", "END", 4)


def test_a_stop_string_across_pieces_is_held_back() -> None:
    m = matcher("END")
    assert [m.feed("oneE"), m.feed("N"), m.feed("D!")] == [Released("one"), Released(""), Released("END", "END", 0)]


def test_what_was_held_back_is_shown_as_soon_as_it_cannot_match() -> None:
    m = matcher("abcd", "bx")
    assert m.feed("zab") == Released("z")  # "ab" of "abcd", "b" of "bx"
    assert m.feed("c") == Released("")
    assert m.feed("x") == Released("abcx")
    assert m.num_held == 0


def test_only_the_suffix_that_may_match_stays_held() -> None:
    m = matcher("aab")
    assert m.feed("aa") == Released("")
    assert m.feed("a") == Released("a")
    assert m.feed("b") == Released("aab", "aab", 0)


def test_closing_gives_what_was_held_back() -> None:
    m = matcher("END")
    assert m.feed("the EN") == Released("the ")
    assert m.close() == "EN"
    assert m.close() == ""


def test_the_first_to_be_complete_wins() -> None:
    assert matcher("abcd", "bc").feed("abcd") == Released("abc", "bc", 1)
    assert matcher("second", "first").feed("first second") == Released("first", "first", 0)


def test_of_two_that_are_complete_together_the_longer_wins() -> None:
    assert matcher("c", "abc", "bc").feed("abc") == Released("abc", "abc", 0)
    assert matcher("c", "abc", "bc").feed("xbc") == Released("xbc", "bc", 1)


def test_a_piece_that_may_not_stop_is_plain_text() -> None:
    m = matcher("ab")
    assert m.feed("ab", may_stop=False) == Released("ab")
    assert m.feed("xab") == Released("xab", "ab", 1)


def test_a_stop_string_that_begins_where_none_may_and_ends_where_it_may_counts() -> None:
    m = matcher("aa")
    assert m.feed("aa", may_stop=False) == Released("a")
    assert m.feed("a") == Released("aa", "aa", 0)


@pytest.mark.parametrize("strings", [(), ("",), ("a", "")])
def test_stop_strings_must_not_be_empty(strings: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopStrings(strings)
