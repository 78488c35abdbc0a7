"""What changes add up to, told again as changes."""

from motet.block_names import block_names
from motet.kv_events.changes import Cleared, Removed, Stored
from motet.kv_events.stored_now import StoredNow

SIZE = 4


def test_what_is_stored_now_is_told_in_runs_with_tokens_and_parents() -> None:
    tokens = tuple(range(16))
    a, b, c, d = block_names(tokens, SIZE, "")
    other = block_names(range(50, 58), SIZE, "pepper")
    now = StoredNow()
    for change in (
        Stored((a, b), None, tokens[:8]),
        Stored((c, d), b, tokens[8:]),
        Stored(tuple(other), None, tuple(range(50, 58)), salted=True),
        Stored((a,), None, tokens[:4]),
    ):
        now.apply(change)
    assert now.salted_among([a, *other, b"unknown"]) == set(other)
    assert list(now.changes()) == [
        Stored((a, b, c, d), None, tokens),
        Stored(tuple(other), None, tuple(range(50, 58)), salted=True),
    ]
    now.apply(Removed((b, other[1])))
    assert list(now.changes()) == [
        Stored((a,), None, tokens[:4]),
        Stored((c, d), b, tokens[8:]),
        Stored((other[0],), None, (50, 51, 52, 53), salted=True),
    ]
    now.apply(Cleared())
    assert len(now) == 0 and list(now.changes()) == []
