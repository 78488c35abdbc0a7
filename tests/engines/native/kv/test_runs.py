"""Free block ids: which ones are handed out, literally."""

from motet.engines.native.kv.runs import FreeRuns


def free_runs(num_blocks: int, *free: int) -> FreeRuns:
    """Only `free` are left of `num_blocks`."""
    runs = FreeRuns(num_blocks)
    runs.take(num_blocks)
    for block in free:
        runs.add(block)
    return runs


def test_a_fresh_set_is_one_run_and_is_cut_from_the_front() -> None:
    runs = FreeRuns(10)
    assert runs.take(3) == [0, 1, 2]
    assert runs.take(2) == [3, 4]
    assert runs.runs() == [(5, 10)]
    assert len(runs) == 5


def test_a_set_of_no_blocks_is_empty() -> None:
    runs = FreeRuns(0)
    assert runs.runs() == []
    assert len(runs) == 0
    assert runs.take(0) == []


def test_a_returned_block_joins_the_runs_on_both_sides() -> None:
    runs = free_runs(10, 2, 3, 5, 6)
    assert runs.runs() == [(2, 4), (5, 7)]
    runs.add(4)
    assert runs.runs() == [(2, 7)]


def test_a_returned_block_joins_only_what_touches_it() -> None:
    runs = free_runs(10, 1, 4)
    runs.add(2)
    runs.add(8)
    assert runs.runs() == [(1, 3), (4, 5), (8, 9)]


def test_the_smallest_run_that_is_long_enough_is_cut() -> None:
    runs = free_runs(20, 0, 2, 3, 4, 10, 11, 12, 13, 14)  # runs of 1, 3 and 5
    assert runs.take(2) == [2, 3]
    assert runs.take(1) in ([0], [4])
    assert runs.take(4) == [10, 11, 12, 13]


def test_without_a_run_long_enough_the_longest_ones_are_used_up_first() -> None:
    runs = free_runs(20, 0, 2, 3, 4, 10, 11, 12, 13)  # runs of 1, 3 and 4
    assert runs.take(6) == [10, 11, 12, 13, 2, 3]
    assert runs.runs() == [(0, 1), (4, 5)]


def test_blocks_that_follow_the_wanted_one_win_over_a_better_fit() -> None:
    runs = free_runs(20, 3, 10, 11, 12, 13)
    assert runs.take(1, after=9) == [10]
    assert runs.take(1, after=10) == [11]


def test_a_run_behind_the_wanted_block_that_is_too_short_is_not_begun() -> None:
    runs = free_runs(20, 5, 10, 11, 12)
    assert runs.take(2, after=4) == [10, 11]
    assert runs.take(1, after=19) in ([5], [12])
