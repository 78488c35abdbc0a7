"""The shortlist: the workers of a large fleet that are considered for a group."""

import pytest

from motet.routing.choosing.survey import COMPARE_ALL, LONGEST, WINDOW, shortlist

IDS = [f"w{number}" for number in range(1000)]


def test_all_workers_of_a_small_fleet_are_considered() -> None:
    assert shortlist(IDS[:COMPARE_ALL], [{"w3": 5}], session="w9", able=IDS[:COMPARE_ALL], turn=7) == IDS[:COMPARE_ALL]


def test_a_fixed_number_of_a_large_fleet_is_considered_and_none_twice() -> None:
    short = shortlist(IDS, [], session=None, able=IDS, turn=3)
    assert len(short) == len(set(short)) == WINDOW


def test_the_session_s_worker_and_the_longest_prefixes_are_always_considered() -> None:
    overlap = {id: number for number, id in enumerate(IDS[:500])}
    for turn in range(50):
        short = set(shortlist(IDS, [overlap], session="w700", able=IDS, turn=turn))
        assert {"w700", *IDS[500 - LONGEST : 500]} <= short
        assert len(short) <= WINDOW + LONGEST + 1


def test_workers_that_take_no_work_are_never_considered() -> None:
    assert set(shortlist(IDS[:500], [{"w900": 9}], session="w901", able=IDS[:500], turn=0)) <= set(IDS[:500])


@pytest.mark.parametrize("workers", [COMPARE_ALL + 1, 1000, 1024])
def test_all_workers_have_about_the_same_number_of_turns(workers: int) -> None:
    turns = 20 * workers // WINDOW
    considered = dict.fromkeys(IDS[:workers] + [f"w{number}" for number in range(1000, workers)], 0)
    ids = list(considered)
    for turn in range(turns):
        for id in shortlist(ids, [], session=None, able=considered, turn=turn):
            considered[id] += 1
    fair = turns * WINDOW / workers
    assert all(abs(count - fair) <= 4 for count in considered.values())


def test_if_too_many_workers_have_a_prefix_the_longest_ones_are_considered() -> None:
    overlap = {id: 20 for id in IDS if id != "w5"} | {"w5": 83}
    for turn in range(20):
        assert "w5" in shortlist(IDS, [overlap], session=None, able=IDS, turn=turn)
