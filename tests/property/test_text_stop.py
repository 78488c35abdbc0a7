"""The stop matcher against a search through the complete text."""

from hypothesis import given
from hypothesis import strategies as st

from motet.text.stop_strings import StopMatcher, StopStrings
from tests.property.text_oracle import cut, first_stop

LETTERS = st.text("abé日", max_size=24)
STOPS = st.lists(st.text("abé日", min_size=1, max_size=5), min_size=1, max_size=4)


@given(LETTERS, STOPS, st.lists(st.integers(0, 24)), st.integers(0, 24))
def test_text_in_pieces_stops_where_the_complete_text_does(
    text: str, stops: list[str], cuts: list[int], plain_until: int
) -> None:
    plain_until = min(plain_until, len(text))
    matcher, shown, stop, read = StopMatcher(StopStrings(stops)), "", None, 0
    for piece in cut(text, [*cuts, plain_until]):
        released = matcher.feed(piece, may_stop=read >= plain_until)
        shown, read = shown + released.text, read + len(piece)
        if released.stop is not None:
            stop = released.stop
            break
    expected = first_stop(text, stops, after=plain_until)
    if expected is None:
        assert (stop, shown + matcher.close()) == (None, text)
    else:
        assert (stop, shown) == (expected.stop, text[: expected.start])


@given(LETTERS, STOPS, st.lists(st.integers(0, 24)))
def test_exactly_the_start_of_a_stop_string_is_held(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, read = StopMatcher(StopStrings(stops)), ""
    for piece in cut(text, cuts):
        matcher.feed(piece, may_stop=False)
        read += piece
        suffixes = (read[i:] for i in range(len(read) + 1))
        longest = next(s for s in suffixes if any(stop.startswith(s) and stop != s for stop in stops))
        assert matcher.num_held == len(longest)
