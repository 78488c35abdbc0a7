"""Which workers of a large fleet are looked at."""

import pytest

from motet.routing.survey import EVERYBODY, LONGEST, WINDOW, shortlist

IDS = [f"w{number}" for number in range(1000)]


def test_a_small_fleet_is_looked_at_whole() -> None:
    assert shortlist(IDS[:EVERYBODY], {"w3": 5}, session="w9", able=IDS[:EVERYBODY], turn=7) == IDS[:EVERYBODY]


def test_of_a_large_fleet_so_many_are_looked_at_and_none_twice() -> None:
    short = shortlist(IDS, {}, session=None, able=IDS, turn=3)
    assert len(short) == len(set(short)) == WINDOW


def test_the_session_and_the_longest_prefixes_are_among_them_whatever_the_turn() -> None:
    overlap = {id: number for number, id in enumerate(IDS[:500])}
    for turn in range(50):
        short = set(shortlist(IDS, overlap, session="w700", able=IDS, turn=turn))
        assert {"w700", *IDS[500 - LONGEST : 500]} <= short
        assert len(short) <= WINDOW + LONGEST + 1


def test_workers_that_take_no_work_are_not_looked_at_whatever_they_have() -> None:
    assert set(shortlist(IDS[:500], {"w900": 9}, session="w901", able=IDS[:500], turn=0)) <= set(IDS[:500])


@pytest.mark.parametrize("workers", [EVERYBODY + 1, 1000, 1024])
def test_everybody_has_about_as_many_turns(workers: int) -> None:
    turns = 20 * workers // WINDOW
    seen = dict.fromkeys(IDS[:workers] + [f"w{number}" for number in range(1000, workers)], 0)
    ids = list(seen)
    for turn in range(turns):
        for id in shortlist(ids, {}, session=None, able=seen, turn=turn):
            seen[id] += 1
    fair = turns * WINDOW / workers
    assert all(abs(count - fair) <= 4 for count in seen.values())


def test_of_more_with_a_prefix_than_are_looked_at_those_with_most_of_it_are() -> None:
    overlap = {id: 20 for id in IDS if id != "w5"} | {"w5": 83}
    for turn in range(20):
        assert "w5" in shortlist(IDS, overlap, session=None, able=IDS, turn=turn)
